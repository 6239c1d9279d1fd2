"""Golden images of volume records: what lies between a superblock's copy and segment 0.

``python -m tests.fabric.flash.golden_volumes`` in the repository writes to ``golden/volumes/`` those that are
missing, as ``golden_images`` does with the others.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import xxhash
from tests.fabric.flash.golden_images import FOLDER, SUPERBLOCK

from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.flash.volume_records import copy_bytes, encode_volumes
from ostraca_fabric.model.ids import OwnerEpoch, TenantId
from ostraca_fabric.model.volume import KvGroup, Layout, VolumeRecord

VOLUMES_FOLDER = FOLDER / "volumes"
ROOM = copy_bytes(SUPERBLOCK.geometry)
OTHER = replace(SUPERBLOCK, format_id=bytes(16))

PLAIN = VolumeRecord(TenantId("tenant"), "volume", Layout("model@1", "bf16", 16), 1 << 20)
FULL = VolumeRecord(
    TenantId("other-tenant"),
    "second",
    Layout(
        "modèle/\U0001f99c@2",
        "fp8_e4m3",
        64,
        (KvGroup(30, 8, 128), KvGroup(2, 1, 576, "mla")),
        tensor_parallel=2,
        pipeline_parallel=3,
        context_parallel=4,
        adapter="lora@7",
        cache_salt='"quoted"',
        hash_bytes=64,
        format_version=9,
    ),
    16 << 20,
    incarnation=3,
)


def copy_of(*volumes: VolumeRecord, sequence: int, of: Superblock = SUPERBLOCK, epoch: int = 5) -> bytes:
    pages = encode_volumes(of.identity, ROOM, volumes, epoch=OwnerEpoch(epoch), sequence=sequence)
    return pages.ljust(ROOM, b"\0")


def of_version(version: int) -> bytes:
    """Return a copy of another version, its checksum right."""
    page = bytearray(copy_of(PLAIN, sequence=9))
    struct.pack_into("<I", page, 16, version)
    end = 64 + struct.unpack_from("<I", page, 56)[0]
    struct.pack_into("<Q", page, 0, xxhash.xxh3_64_intdigest(page[8:end], seed=SUPERBLOCK.identity.seed))
    return bytes(page)


def torn(pages: bytes) -> bytes:
    """Return a copy whose first 512 bytes alone were written."""
    return pages[:512].ljust(ROOM, b"\0")


def images() -> dict[str, bytes]:
    """Return every image by its name, as today's code writes it."""
    first, second = copy_of(PLAIN, sequence=6), copy_of(PLAIN, FULL, sequence=7)
    return {
        "blank": bytes(2 * ROOM),
        "one": first + bytes(ROOM),
        "two": first + second,
        "two-of-another-owner": copy_of(PLAIN, FULL, sequence=1, epoch=6) + first,
        "second-torn": first + torn(second),
        "first-torn": torn(second) + bytes(ROOM),
        "another-shard-s": copy_of(PLAIN, FULL, sequence=8, of=OTHER) + bytes(ROOM),
        "newer": of_version(2) + first,
        "none": copy_of(sequence=1) + bytes(ROOM),
    }


def stored() -> dict[str, bytes]:
    """Return every image by its name, as it was kept."""
    return {
        file.name[: -len(".bin.z")]: zlib.decompress(file.read_bytes())
        for file in VOLUMES_FOLDER.glob("*.bin.z")
    }


def main() -> None:
    """Write those that are not there yet; never one that is."""
    VOLUMES_FOLDER.mkdir(exist_ok=True)
    for name, image in images().items():
        file = VOLUMES_FOLDER / f"{name}.bin.z"
        if not file.exists():
            file.write_bytes(zlib.compress(image, 9))


if __name__ == "__main__":
    main()
