"""``ostraca fabric create``: begin a fabric that etcd keeps, on drives that are files.

Whatever is there already is found and kept, so it may be repeated after a crash, or with more enclosures. Its
directory holds, beside the drives, what every agent needs and nobody else may read: the fabric's key, and the
tokens by which agents and workers are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca.cli.sizes import size_text
from ostraca.cli.state import KEY_FILE, locked, read_key, write_key
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.adapters.etcd.found import fabric_at
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.whole_files import write_whole
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.ids import ID_BYTES, EnclosureId, FabricId
from ostraca_fabric.keys import FABRIC_KEY_BYTES, fabric_key_check
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca_fabric.fabric_map import EnclosureRecord, FabricMap

TOKENS_FILE = "tokens.toml"
_TOKEN_BYTES = 24
_MIB = 1 << 20

_TOKENS = """\
# Who may speak for whom. `ostraca serve agent --tokens` reads it, and again when it changes.
fabric = ["{fabric}"]

[tokens]
default = ["{worker}"]
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What flash a fabric is to have."""

    enclosures: int
    drives: int
    """Of each enclosure."""

    capacity_bytes: int
    """Of all drives together."""

    segment_bytes: int | None = None
    """Of drives that are made; None: as follows from their size."""

    @property
    def drive_bytes(self) -> int:
        """The size of each drive, in whole MiB."""
        return self.capacity_bytes // (self.enclosures * self.drives) // _MIB * _MIB


@dataclass(frozen=True, slots=True)
class Created:
    """A fabric that was begun, or found."""

    fabric: FabricId
    is_new: bool
    directory: Path
    enclosures: tuple[EnclosureRecord, ...]


def create(place: EtcdPlace, directory: Path, shape: Shape) -> Created:
    """Begin the fabric at *place*, or find it, and see to it that it has these drives, below *directory*.

    Raises an OstracaError that says what to do: etcd can't be reached; the directory holds drives or a key of
    another fabric, or is in use; there is no room.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.closing(locked(directory, f"another process works on {directory}: wait for it")):
        return asyncio.run(_create(place, directory, shape))


async def _create(place: EtcdPlace, directory: Path, shape: Shape) -> Created:
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
        made = [
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
        records = [await asyncio.to_thread(enclosure.prepare) for enclosure in made]
        known = membership.map.enclosures
        await membership.put_enclosures([each for each in records if known.get(each.id) != each])
        return Created(fabric, found is None, directory, tuple(records))
    finally:
        await membership.close()


def created_lines(created: Created, place: EtcdPlace) -> Iterator[str]:
    """Say what there is now, and what to start next."""
    done = "begun" if created.is_new else "found"
    yield f"fabric {created.fabric.hex()} {done} under {place.text}"
    for enclosure in created.enclosures:
        size = size_text(sum(shard.size_bytes for shard in enclosure.shards))
        drives = len(enclosure.drives)
        yield f"  {enclosure.id}  {drives} {'drive' if drives == 1 else 'drives'}, {size}"
    where = created.directory
    yield f"Every agent needs {where / KEY_FILE} and {where / TOKENS_FILE}; show them to nobody else."
    yield "Start an agent by:"
    yield (
        f"  ostraca serve agent --id agent-0 {place.options()} --fabric-key {where / KEY_FILE} "
        f"--tokens {where / TOKENS_FILE} --state-dir {where / 'agent-0'} "
        f"--listen unix://{where}/agent-0.sock --listen tcp://127.0.0.1:7400"
    )


def _refuse_drives(directory: Path, place: EtcdPlace) -> None:
    drive = next(iter(sorted(directory.glob("enclosure-*/*.img"))), None)
    if drive is not None:
        raise UsageError(
            f"{drive} is there, and under {place.text} is no fabric. If etcd has lost it, make it again by "
            f"`ostraca fabric rebuild --files {directory} --etcd ...`; else check endpoints and prefix, or "
            "take another --files"
        )


def _refuse_fewer(fabric_map: FabricMap, shape: Shape) -> None:
    """Take nothing away from a fabric that is there."""
    for number in range(shape.enclosures):
        there = fabric_map.enclosures.get(EnclosureId(f"enclosure-{number}"))
        if there is not None and len(there.drives) > shape.drives:
            raise UsageError(
                f"{there.id} has {counted(len(there.drives), 'drive')}: their blocks would be lost with "
                f"--drives {shape.drives}"
            )


def _key(directory: Path, *, is_new: bool) -> bytes:
    """Return the fabric's key; one is made for a fabric that is new, and only then."""
    path = directory / KEY_FILE
    if not path.exists():
        if not is_new:
            raise FormatError(f"{path} is missing, and the fabric has a key already: copy it there")
        write_key(path, secrets.token_bytes(FABRIC_KEY_BYTES))
    return read_key(path)


def _make_tokens(directory: Path) -> None:
    path = directory / TOKENS_FILE
    if not path.exists():
        fabric, worker = (secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(2))
        write_whole(path, _TOKENS.format(fabric=fabric, worker=worker).encode(), mode=0o600)
