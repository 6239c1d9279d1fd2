"""``ostraca fabric create``: begin a fabric in etcd, on drives that are files, or with a given key.

The command keeps existing parts, so callers may repeat the command after a crash or with more enclosures.
Beside the drives, the directory holds secrets for every agent: the fabric's key, and the tokens of agents and
workers. No other user may read the secrets. With a given key, as in a Kubernetes Job, the command writes to
etcd alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ostraca_cli.commands.serve.store import retry_while_away
from ostraca_cli.composition.etcd_options import EtcdPlace, etcd_keys, etcd_settings
from ostraca_cli.composition.secret_files import read_access, read_fabric_key
from ostraca_cli.composition.state import KEY_FILE, lock_directory, read_key, write_key
from ostraca_cli.terminal.units import size_text
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.errors import FormatError, MembershipError, UsageError
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.store import fabric_at
from ostraca_fabric.model.fabric_map import EnclosureRecord, FabricMap, ShardRecord
from ostraca_fabric.model.ids import ID_BYTES, DriveId, EnclosureId, FabricId
from ostraca_fabric.runtime.atomic_files import make_private_folder, write_whole
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.tables.digests import FABRIC_KEY_BYTES, fabric_key_check

TOKENS_FILE = "tokens.toml"
_TOKEN_BYTES = 24
_MIB = 1 << 20

_TOKENS = """\
# Tokens of the fabric and of tenants. `ostraca serve agent --tokens` reads this file, and reloads changes.
fabric = ["{fabric}"]

[tokens]
default = ["{worker}"]
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Requested flash of a fabric."""

    enclosures: int
    drives: int
    """Drives of each enclosure."""

    capacity_bytes: int
    """Flash of all drives together."""

    segment_bytes: int | None = None
    """Segment size of new drives; None: derived from the drive size."""

    replaced: frozenset[DriveId] = frozenset()
    """Recorded drives to replace by an empty drive, if the file is gone."""

    @property
    def drive_bytes(self) -> int:
        """Return the size of each drive, in whole MiB."""
        return self.capacity_bytes // (self.enclosures * self.drives) // _MIB * _MIB


@dataclass(frozen=True, slots=True)
class CreationResult:
    """New or existing fabric."""

    fabric: FabricId
    is_new: bool
    key_file: Path
    tokens_file: Path
    folder: Path
    """Directory for agents in the printed command."""

    enclosures: tuple[EnclosureRecord, ...]
    kept: int = 0
    """Number of existing drives with a size other than the requested size."""

    unusable: Mapping[DriveId, str] = field(default_factory=dict)
    """Reason why a recorded drive is unusable now, by drive."""


def create(place: EtcdPlace, directory: Path, shape: Shape) -> CreationResult:
    """Begin or find the fabric at *place*, with the drives of *shape* in *directory*.

    Raises an OstracaError with advice: etcd is unreachable; the directory is in use, or holds drives or a key
    of another fabric; the disk is full.
    """
    try:
        make_private_folder(directory)
    except OSError as error:
        raise MembershipError(f"cannot create the directory of the fabric: {explained(error)}") from error
    with contextlib.closing(lock_directory(directory, f"another process uses {directory}: wait for its end")):
        return asyncio.run(_create(place, directory, shape))


async def _create(place: EtcdPlace, directory: Path, shape: Shape) -> CreationResult:
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    found = await fabric_at(keys, settings, dice=dice)
    if found is None:
        _refuse_drives(directory, place)
    key = _key(directory, is_new=found is None)
    _make_tokens(directory)
    fabric = found or FabricId(secrets.token_bytes(ID_BYTES))
    membership = await EtcdMembership.open(
        fabric, settings, dice=dice, keys=keys, begin=True, key_check=fabric_key_check(key, fabric)
    )
    try:
        _refuse_fewer(membership.map, shape)
        file_enclosures = [
            FileEnclosure(
                EnclosureId(f"enclosure-{number}"),
                directory / f"enclosure-{number}",
                fabric=fabric,
                drives=shape.drives,
                drive_bytes=shape.drive_bytes,
                segment_bytes=shape.segment_bytes,
            )
            for number in range(shape.enclosures)
        ]
        kept = sum([await asyncio.to_thread(enclosure.count_of_other_size) for enclosure in file_enclosures])
        recorded = _recorded(membership.map, shape.replaced)
        records = [await asyncio.to_thread(enclosure.prepare, recorded) for enclosure in file_enclosures]
        known = membership.map.enclosures
        await membership.put_enclosures([each for each in records if known.get(each.id) != each])
        unusable = {drive: why for each in file_enclosures for drive, why in each.unusable.items()}
        key_file, tokens_file = directory / KEY_FILE, directory / TOKENS_FILE
        return CreationResult(
            fabric, found is None, key_file, tokens_file, directory, tuple(records), kept, unusable
        )
    finally:
        await membership.close()


def create_with_key(place: EtcdPlace, key_file: Path, tokens_file: Path, *, wait_s: float) -> CreationResult:
    """Begin or find the fabric at *place*, with the given key, and without enclosures.

    Waits up to *wait_s* for etcd. Raises FormatError for unusable files, and an OstracaError with advice:
    etcd is unreachable, or holds a fabric with another key.
    """
    key = read_fabric_key(key_file)
    if not read_access(tokens_file, os.getuid()).fabric_tokens:
        raise FormatError(f"{tokens_file} has no fabric token: add `fabric = [...]` for agents over TCP")
    return asyncio.run(_create_with_key(place, key, (key_file, tokens_file), wait_s=wait_s))


async def _create_with_key(
    place: EtcdPlace, key: bytes, files: tuple[Path, Path], *, wait_s: float
) -> CreationResult:
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    found = await retry_while_away(
        "create the fabric", lambda: fabric_at(keys, settings, dice=dice), within_s=wait_s
    )
    fabric = found or FabricId(secrets.token_bytes(ID_BYTES))
    membership = await EtcdMembership.open(
        fabric, settings, dice=dice, keys=keys, begin=True, key_check=fabric_key_check(key, fabric)
    )
    await membership.close()
    return CreationResult(fabric, found is None, *files, Path("/var/lib/ostraca"), ())


def created_lines(created: CreationResult, place: EtcdPlace) -> Iterator[str]:
    """Describe the fabric and the next command to run."""
    done = "created" if created.is_new else "found"
    yield f"fabric {created.fabric.hex()} {done} under {place.text}"
    for enclosure in created.enclosures:
        size = size_text(sum(shard.size_bytes for shard in enclosure.shards))
        yield f"  {enclosure.id}  {counted(len(enclosure.drives), 'drive')}, {size}"
    if created.kept:
        yield (
            f"{counted(created.kept, 'existing drive')} of another size left unchanged: --capacity and "
            "--segment apply to new drives only."
        )
    for drive, why in created.unusable.items():
        yield (
            f"UNUSABLE: {why}. Agents serve the other drives. For an empty drive instead, move the file "
            f"away and repeat the command with --replace {drive}"
        )
    where = created.folder
    yield f"Every agent needs {created.key_file} and {created.tokens_file}; keep both files secret."
    yield "Start an agent by:"
    yield (
        f"  ostraca serve agent --id agent-0 {place.options()} --fabric-key {created.key_file} "
        f"--tokens {created.tokens_file} --state-dir {where / 'agent-0'} "
        f"--listen unix://{where}/agent-0.sock --listen tcp://127.0.0.1:7400"
    )


def _refuse_drives(directory: Path, place: EtcdPlace) -> None:
    drive = next(iter(sorted(directory.glob("enclosure-*/*.img"))), None)
    if drive is not None:
        raise UsageError(
            f"{drive} exists, but no fabric under {place.text}. After a loss of etcd, run `ostraca fabric "
            f"rebuild --files {directory} --etcd ...`; otherwise check endpoints and prefix, or give "
            "another --files"
        )


def _refuse_fewer(fabric_map: FabricMap, shape: Shape) -> None:
    """Raise UsageError if *shape* has fewer drives than the existing fabric."""
    for number in range(shape.enclosures):
        existing = fabric_map.enclosures.get(EnclosureId(f"enclosure-{number}"))
        if existing is not None and len(existing.drives) > shape.drives:
            raise UsageError(
                f"{existing.id} has {counted(len(existing.drives), 'drive')}, and --drives {shape.drives} "
                "would lose blocks: give at least the existing number"
            )


def _recorded(fabric_map: FabricMap, replaced: Collection[DriveId]) -> Mapping[DriveId, ShardRecord]:
    """Return the fabric's drives to keep as recorded; raises UsageError."""
    shards = {shard.drive: shard for shard in fabric_map.shards()}
    for drive in replaced:
        if drive not in shards:
            raise UsageError(f"--replace {drive}: the fabric has no such drive")
    return {drive: shard for drive, shard in shards.items() if drive not in replaced}


def _key(directory: Path, *, is_new: bool) -> bytes:
    """Return the fabric's key; creates a key only for a new fabric."""
    path = directory / KEY_FILE
    if not path.exists():
        if not is_new:
            raise FormatError(f"{path} is missing, and the fabric already has a key: copy the key there")
        write_key(path, secrets.token_bytes(FABRIC_KEY_BYTES))
    return read_key(path)


def _make_tokens(directory: Path) -> None:
    path = directory / TOKENS_FILE
    if not path.exists():
        fabric, worker = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(2))
        write_whole(path, _TOKENS.format(fabric=fabric, worker=worker).encode())
