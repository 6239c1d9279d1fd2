"""What lies in etcd, as JSON that ``etcdctl get`` shows: each kind of record to bytes, and back to its type.

Every record says the version of its form. A release reads versions up to its own, and leaves out fields that
it does not know; what is newer it refuses. Ids of bytes are in hexadecimal.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ostraca_fabric.adapters.membership_rules import ShardGrants
from ostraca_fabric.errors import MembershipError, UsageError, shown
from ostraca_fabric.fabric_map import (
    AgentRecord,
    Claim,
    DriveRecord,
    EnclosureRecord,
    EnclosureState,
    Grant,
    PlacementRecord,
    ShardRecord,
)
from ostraca_fabric.ids import (
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
from ostraca_fabric.inventory import DriveReport, EnclosureReport
from ostraca_fabric.layout import Layout
from ostraca_fabric.target import Target, parse_controller
from ostraca_fabric.volume import VolumeRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ostraca_fabric.adapters.etcd.told import Entry

VERSION = 1
"""The newest version of records that this release reads, and the one it writes."""

GRANTS_VERSION = 2
"""That of a shard's grants where one of them is whole: who can't know takes it for one of no segments."""

_ADVICE = "start a release of Ostraca as new as the fabric's"
_META_ADVICE = (
    "write it again as it was (docs/reference/etcd-keys.md shows one), or take another prefix where it is "
    "not Ostraca's"
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
    """A layout with a field that this release does not know has another."""

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
    """Say which fabric lies under a prefix, what its key is told by (``keys.fabric_key_check``), and when a
    rebuild made it again; 0: none did.
    """
    return msgspec.json.encode(_Meta(VERSION, fabric.hex(), key_check, rebuilt_unix_s))


def decode_meta(data: bytes) -> FabricId:
    """Return which fabric it is."""
    return _decoded(data, _Meta, lambda meta: FabricId(_id_of(meta.fabric)), advice=_META_ADVICE)


def decode_key_check(data: bytes) -> str:
    """Return what the fabric's key is told by; empty when that was not said."""
    return _decoded(data, _Meta, lambda meta: meta.key_check)


def decode_rebuilt(data: bytes) -> float:
    """Return when a rebuild made the fabric again, in seconds since 1970; 0 where none did."""
    return _decoded(data, _Meta, lambda meta: meta.rebuilt_unix_s)


def encode_agent(record: AgentRecord) -> bytes:
    """Describe an agent."""
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
    """Describe an enclosure with its drives and shards."""
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
    target = None if record.target is None else _encoded_target(record.target)
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
            None if read.target is None else _decoded_target(read.target),
        ),
    )


def encode_report(report: EnclosureReport) -> bytes:
    """Say what an enclosure says of itself."""
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
    """Return what an enclosure says of itself."""
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


def _encoded_target(target: Target) -> _Target:
    return _Target(target.nqn, tuple(map(str, target.controllers)), target.secret)


def _decoded_target(read: _Target) -> Target:
    return Target(read.nqn, tuple(map(parse_controller, read.controllers)), read.secret)


def encode_placement(epoch: PlacementEpoch) -> bytes:
    """Say which placement epoch is current."""
    return msgspec.json.encode(_Placement(VERSION, epoch))


def decode_placement(data: bytes) -> PlacementEpoch:
    """Return the current placement epoch."""
    return _decoded(data, _Placement, lambda read: PlacementEpoch(read.epoch))


def encode_earlier_placement(record: PlacementRecord) -> bytes:
    """Describe the weights of a placement epoch that is over."""
    weights: dict[str, dict[str, int]] = {
        enclosure: dict(shards.items()) for enclosure, shards in record.weights.items()
    }
    return msgspec.json.encode(_EarlierPlacement(VERSION, record.epoch, weights))


def decode_earlier_placement(data: bytes) -> PlacementRecord:
    """Return a placement epoch that is over."""
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
    """Say who owns a shard."""
    return msgspec.json.encode(_Claim(VERSION, shard, claim.agent, claim.start.hex(), claim.epoch))


def decode_claim(data: bytes) -> tuple[ShardId, Claim]:
    """Return a shard and who owns it."""
    return _decoded(
        data,
        _Claim,
        lambda read: (
            ShardId(read.shard),
            Claim(AgentId(read.agent), _start_of(read.start), OwnerEpoch(read.epoch)),
        ),
    )


def encode_grants(grants: ShardGrants) -> bytes:
    """Say what each owner epoch of a shard may write."""
    unretired = tuple(
        _Grant(grant.epoch, grant.agent, grant.start.hex(), grant.segments, grant.is_closed, grant.is_whole)
        for grant in grants.unretired
    )
    version = GRANTS_VERSION if any(grant.is_whole for grant in grants.unretired) else VERSION
    return msgspec.json.encode(_Grants(version, grants.epoch, unretired))


def decode_grants(data: bytes) -> ShardGrants:
    """Return what each owner epoch of a shard may write."""
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
    """Describe a volume."""
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
        message = f"the layout of volume {shown(read.name)} says more than this release knows: {_ADVICE}"
        raise MembershipError(message)
    return VolumeRecord(
        TenantId(read.tenant),
        read.name,
        read.layout,
        read.block_bytes,
        read.incarnation,
        is_erasable=read.erasable,
    )


def encode_rebuild(fabric: FabricId, start: StartId) -> bytes:
    """Say which fabric is being made again, and by which try."""
    return msgspec.json.encode(_Rebuild(VERSION, fabric.hex(), start.hex()))


def decode_rebuild(data: bytes) -> tuple[FabricId, StartId]:
    """Return which fabric is being made again, and by which try."""
    return _decoded(data, _Rebuild, lambda read: (FabricId(_id_of(read.fabric)), _start_of(read.start)))


def decode_readable(found: Iterable[Entry], decode: Callable[[bytes], _Type]) -> list[_Type]:
    """Decode what lies at several keys; records that this release can't read are left out, as in its view."""
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
    """Read one record. Raises MembershipError that says what to do: *advice*, where it is broken."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version <= newest:
            return made(msgspec.json.decode(data, type=form))
    # Nesting without end is a RecursionError.
    except (msgspec.DecodeError, UsageError, ValueError, RecursionError) as error:
        message = f"a record in etcd can't be read: {error}{advice and f': {advice}'}"
        raise MembershipError(message) from error
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
