"""Records in etcd, as JSON readable with ``etcdctl get``: encoders and decoders.

Every record has a version. A release reads versions up to its own, ignores unknown fields, and refuses newer
versions. Binary ids are in hexadecimal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from ostraca_fabric.errors import MembershipError, UsageError, shown
from ostraca_fabric.membership.etcd.client.watch_events import Entry
from ostraca_fabric.membership.rules import ShardGrants
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    Claim,
    DriveRecord,
    EnclosureRecord,
    EnclosureState,
    Grant,
    PlacementRecord,
    ShardRecord,
)
from ostraca_fabric.model.ids import (
    ID_BYTES,
    AgentId,
    DriveId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    ShardId,
    StartId,
    TenantId,
)
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.model.target import Target, parse_controller
from ostraca_fabric.model.volume import Layout, VolumeRecord

VERSION = 1
"""Newest version of records read by this release, and the version written."""

GRANTS_VERSION = 2
"""Version of a shard's grants with a whole-shard grant. An older release would read that grant as one of no
segments."""

_ADVICE = "start a release of Ostraca as new as the fabric's"
_META_ADVICE = (
    "restore the record (docs/reference/formats/etcd-keys.md shows an example), or take another prefix if "
    "the key is not Ostraca's"
)


class _Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    fabric: str
    key_check: str = ""
    rebuilt_unix_s: float = 0.0


class _Agent(msgspec.Struct, frozen=True):
    version: int
    agent: str
    start: str
    addresses: tuple[str, ...]
    leaving: bool = False


class _Drive(msgspec.Struct, frozen=True, omit_defaults=True):
    drive: str
    path: str
    nguid: str = ""


class _Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    shard: str
    drive: str
    offset: int
    size_bytes: int
    weight: int
    block_bytes_max: int
    usable_bytes: int = 0


class _Target(msgspec.Struct, frozen=True, omit_defaults=True):
    nqn: str
    controllers: tuple[str, ...]
    secret: str = ""


class _Enclosure(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    enclosure: str
    state: EnclosureState
    drives: tuple[_Drive, ...]
    shards: tuple[_Shard, ...]
    target: _Target | None = None


class _Report(msgspec.Struct, frozen=True):
    version: int
    enclosure: str
    start: str
    nqn: str
    controllers: tuple[str, ...]
    drives: tuple[DriveReport, ...]
    hosts: tuple[str, ...]
    sentence: str
    unix_s: float


class _Placement(msgspec.Struct, frozen=True):
    version: int
    epoch: int


class _EarlierPlacement(msgspec.Struct, frozen=True):
    version: int
    epoch: int
    weights: dict[str, dict[str, int]]


class _Claim(msgspec.Struct, frozen=True):
    version: int
    shard: str
    agent: str
    start: str
    epoch: int


class _Grant(msgspec.Struct, frozen=True, omit_defaults=True):
    epoch: int
    agent: str
    start: str
    segments: tuple[int, ...]
    closed: bool
    whole: bool = False


class _Grants(msgspec.Struct, frozen=True):
    version: int
    epoch: int
    unretired: tuple[_Grant, ...]


class _Volume(msgspec.Struct, frozen=True):
    version: int
    tenant: str
    name: str
    incarnation: int
    block_bytes: int
    layout_digest: str
    """Digest of the layout. A mismatch shows a layout field unknown to this release."""

    layout: Layout
    erasable: bool = False


class _Rebuild(msgspec.Struct, frozen=True):
    version: int
    fabric: str
    start: str


class _Versioned(msgspec.Struct, frozen=True):
    version: int


_Record = TypeVar("_Record", bound=msgspec.Struct)
_Type = TypeVar("_Type")


def encode_meta(fabric: FabricId, key_check: str = "", *, rebuilt_unix_s: float = 0.0) -> bytes:
    """Encode a fabric's own record.

    *key_check* identifies the fabric key (``keys.fabric_key_check``). *rebuilt_unix_s* is the time of the
    last rebuild, or 0.
    """
    return msgspec.json.encode(_Meta(VERSION, fabric.hex(), key_check, rebuilt_unix_s))


def decode_meta(data: bytes) -> FabricId:
    """Return the fabric's id."""
    return _decoded(data, _Meta, lambda meta: FabricId(_id_of(meta.fabric)), advice=_META_ADVICE)


def decode_key_check(data: bytes) -> str:
    """Return the check value of the fabric key, or empty if not recorded."""
    return _decoded(data, _Meta, lambda meta: meta.key_check)


def decode_rebuilt(data: bytes) -> float:
    """Return the time of the last rebuild in seconds since 1970, or 0."""
    return _decoded(data, _Meta, lambda meta: meta.rebuilt_unix_s)


def encode_agent(record: AgentRecord) -> bytes:
    """Encode an agent."""
    return msgspec.json.encode(
        _Agent(VERSION, record.id, record.start.hex(), record.addresses, record.is_leaving)
    )


def decode_agent(data: bytes) -> AgentRecord:
    """Return an agent."""
    return _decoded(
        data,
        _Agent,
        lambda read: AgentRecord(
            AgentId(read.agent), _start_of(read.start), read.addresses, is_leaving=read.leaving
        ),
    )


def encode_enclosure(record: EnclosureRecord) -> bytes:
    """Encode an enclosure with its drives and shards."""
    drives = tuple(_Drive(drive.id, drive.path, drive.nguid) for drive in record.drives)
    shards = tuple(
        _Shard(
            shard.id,
            shard.drive,
            shard.offset,
            shard.size_bytes,
            shard.weight,
            shard.block_bytes_max,
            shard.usable_bytes,
        )
        for shard in record.shards
    )
    target = (
        None
        if record.target is None
        else _Target(record.target.nqn, tuple(map(str, record.target.controllers)), record.target.secret)
    )
    return msgspec.json.encode(_Enclosure(VERSION, record.id, record.state, drives, shards, target))


def decode_enclosure(data: bytes) -> EnclosureRecord:
    """Return an enclosure."""
    return _decoded(
        data,
        _Enclosure,
        lambda read: EnclosureRecord(
            EnclosureId(read.enclosure),
            tuple(DriveRecord(DriveId(drive.drive), drive.path, drive.nguid) for drive in read.drives),
            tuple(
                ShardRecord(
                    ShardId(shard.shard),
                    DriveId(shard.drive),
                    shard.offset,
                    shard.size_bytes,
                    shard.weight,
                    shard.block_bytes_max,
                    shard.usable_bytes,
                )
                for shard in read.shards
            ),
            read.state,
            None
            if read.target is None
            else Target(
                read.target.nqn, tuple(map(parse_controller, read.target.controllers)), read.target.secret
            ),
        ),
    )


def encode_report(report: EnclosureReport) -> bytes:
    """Encode an enclosure's report."""
    return msgspec.json.encode(
        _Report(
            VERSION,
            report.id,
            report.start.hex(),
            report.nqn,
            tuple(map(str, report.controllers)),
            report.drives,
            report.hosts,
            report.sentence,
            report.unix_s,
        )
    )


def decode_report(data: bytes) -> EnclosureReport:
    """Return an enclosure's report."""
    return _decoded(
        data,
        _Report,
        lambda read: EnclosureReport(
            EnclosureId(read.enclosure),
            _start_of(read.start),
            read.nqn,
            tuple(map(parse_controller, read.controllers)),
            read.drives,
            read.hosts,
            read.sentence,
            read.unix_s,
        ),
    )


def encode_placement(epoch: PlacementEpoch) -> bytes:
    """Encode the current placement epoch."""
    return msgspec.json.encode(_Placement(VERSION, epoch))


def decode_placement(data: bytes) -> PlacementEpoch:
    """Return the current placement epoch."""
    return _decoded(data, _Placement, lambda read: PlacementEpoch(read.epoch))


def encode_earlier_placement(record: PlacementRecord) -> bytes:
    """Encode the weights of an earlier placement epoch."""
    weights: dict[str, dict[str, int]] = {
        enclosure: dict(shards.items()) for enclosure, shards in record.weights.items()
    }
    return msgspec.json.encode(_EarlierPlacement(VERSION, record.epoch, weights))


def decode_earlier_placement(data: bytes) -> PlacementRecord:
    """Return an earlier placement epoch."""
    return _decoded(
        data,
        _EarlierPlacement,
        lambda read: PlacementRecord(
            PlacementEpoch(read.epoch),
            {
                EnclosureId(enclosure): {ShardId(shard): weight for shard, weight in shards.items()}
                for enclosure, shards in read.weights.items()
            },
        ),
    )


def encode_claim(shard: ShardId, claim: Claim) -> bytes:
    """Encode the owner of a shard."""
    return msgspec.json.encode(_Claim(VERSION, shard, claim.agent, claim.start.hex(), claim.epoch))


def decode_claim(data: bytes) -> tuple[ShardId, Claim]:
    """Return a shard and its claim."""
    return _decoded(
        data,
        _Claim,
        lambda read: (
            ShardId(read.shard),
            Claim(AgentId(read.agent), _start_of(read.start), OwnerEpoch(read.epoch)),
        ),
    )


def encode_grants(grants: ShardGrants) -> bytes:
    """Encode the grants of a shard."""
    unretired = tuple(
        _Grant(grant.epoch, grant.agent, grant.start.hex(), grant.segments, grant.is_closed, grant.is_whole)
        for grant in grants.unretired
    )
    version = GRANTS_VERSION if any(grant.is_whole for grant in grants.unretired) else VERSION
    return msgspec.json.encode(_Grants(version, grants.epoch, unretired))


def decode_grants(data: bytes) -> ShardGrants:
    """Return the grants of a shard."""
    return _decoded(
        data,
        _Grants,
        lambda read: ShardGrants(
            OwnerEpoch(read.epoch),
            tuple(
                Grant(
                    OwnerEpoch(each.epoch),
                    AgentId(each.agent),
                    _start_of(each.start),
                    each.segments,
                    is_closed=each.closed,
                    is_whole=each.whole,
                )
                for each in read.unretired
            ),
        ),
        newest=GRANTS_VERSION,
    )


def encode_volume(record: VolumeRecord) -> bytes:
    """Encode a volume."""
    return msgspec.json.encode(
        _Volume(
            VERSION,
            record.tenant,
            record.name,
            record.incarnation,
            record.block_bytes,
            record.layout.digest().hex(),
            record.layout,
            record.is_erasable,
        )
    )


def decode_volume(data: bytes) -> VolumeRecord:
    """Return a volume."""
    return _decoded(data, _Volume, _volume_of)


def _volume_of(read: _Volume) -> VolumeRecord:
    if read.layout.digest().hex() != read.layout_digest:
        raise MembershipError(
            f"the layout of volume {shown(read.name)} says more than this release knows: {_ADVICE}"
        )
    return VolumeRecord(
        TenantId(read.tenant),
        read.name,
        read.layout,
        read.block_bytes,
        read.incarnation,
        is_erasable=read.erasable,
    )


def encode_rebuild(fabric: FabricId, start: StartId) -> bytes:
    """Encode the fabric and the attempt of an unfinished rebuild."""
    return msgspec.json.encode(_Rebuild(VERSION, fabric.hex(), start.hex()))


def decode_rebuild(data: bytes) -> tuple[FabricId, StartId]:
    """Return the fabric and the attempt of an unfinished rebuild."""
    return _decoded(data, _Rebuild, lambda read: (FabricId(_id_of(read.fabric)), _start_of(read.start)))


def decode_at(key: bytes, value: bytes, decode: Callable[[bytes], _Type]) -> _Type:
    """Decode the value at a key. Raises MembershipError with the key's name."""
    try:
        return decode(value)
    except MembershipError as error:
        raise MembershipError(f"{key.decode(errors='replace')}: {error}") from error


def decode_readable(found: Iterable[Entry], decode: Callable[[bytes], _Type]) -> list[_Type]:
    """Decode several values, without the records unreadable for this release."""
    decoded = []
    for entry in found:
        with contextlib.suppress(MembershipError):
            decoded.append(decode(entry.value))
    return decoded


def _decoded(
    data: bytes,
    form: type[_Record],
    made: Callable[[_Record], _Type],
    *,
    newest: int = VERSION,
    advice: str = "",
) -> _Type:
    """Decode a record. Raises MembershipError with *advice* for a broken record."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version <= newest:
            return made(msgspec.json.decode(data, type=form))
    # Unlimited nesting causes a RecursionError.
    except (msgspec.DecodeError, UsageError, ValueError, RecursionError) as error:
        raise MembershipError(f"a record in etcd can't be read: {error}{advice and f': {advice}'}") from error
    raise MembershipError(
        f"a record in etcd has version {version}, and this release reads {newest} and older: {_ADVICE}"
    )


def _start_of(text: str) -> StartId:
    return StartId(_id_of(text))


def _id_of(text: str) -> bytes:
    found = bytes.fromhex(text)
    if len(found) != ID_BYTES:
        raise ValueError(f"an id of {len(found)} bytes: ids have {ID_BYTES}")
    return found
