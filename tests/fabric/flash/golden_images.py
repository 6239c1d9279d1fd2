"""Golden images: what the first release wrote, kept byte by byte.

``python -m tests.fabric.flash.golden_images`` in the repository writes them to ``golden/``, compressed by
zlib. They are written once for each version of the format: when a test says that today's writer makes others,
the format has changed, and needs a new version and new images beside these.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from tests.fabric import second_implementation

from ostraca_fabric.flash.summary import SummaryLog, entries_of
from ostraca_fabric.flash.superblock import Superblock, encode_superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, Geometry, generation, rounded_up
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId

FOLDER = Path(__file__).parent / "golden"
SUPERBLOCK = Superblock(
    FabricId(bytes(range(16))),
    bytes(range(16, 32)),
    EnclosureId("shelf-7"),
    DriveId("shelf-7/nvme0"),
    ShardId("shelf-7/nvme0/0"),
    0,
    Geometry.planned(3 * MIB, segment_bytes=MIB, block_bytes=4096),
)
VOLUME = ("tenant", "volume", bytes(range(32)))
SECRET = second_implementation.volume_secret(bytes(range(32)), VOLUME[0], VOLUME[1], 1)
LENGTHS = (1, 4096, 4097, 3000, 9000)
FIELDS = {
    "magic": 0,
    "version": 8,
    "zero": 12,
    "checksum": 16,
    "fabric": 24,
    "format": 40,
    "shard-bytes": 56,
    "segment-bytes": 64,
    "first-segment": 72,
    "segments": 80,
    "summary-pages": 84,
    "drive-offset": 88,
    "reserved": 96,
    "enclosure": 128,
    "drive": 192,
    "shard": 320,
    "rest": 4095,
}
"""Where each field of a superblock begins."""


@dataclass(frozen=True)
class GoldenBlock:
    """A block of the golden shard; its number says everything about it."""

    number: int

    @property
    def data(self) -> bytes:
        return (hashlib.sha256(b"%d" % self.number).digest() * 300)[: LENGTHS[self.number % len(LENGTHS)]]

    @property
    def engine_hash(self) -> bytes:
        return hashlib.sha256(b"block %d" % self.number).digest()

    @property
    def key(self) -> bytes:
        return second_implementation.key(SECRET, self.engine_hash, 0, 0)

    @property
    def seed(self) -> int:
        return second_implementation.seed(VOLUME, self.engine_hash, 0, 0, len(self.data))

    @property
    def tag(self) -> bytes:
        return second_implementation.tag(self.data, self.seed)


LISTED = tuple(GoldenBlock(number) for number in (*range(125), *range(202, 205)))
"""What the shard holds: 125 blocks in segment 0, and three in segment 1, in its second generation."""


def shard_image() -> bytes:
    """Return a shard as an owner writes it, data before summaries."""
    image = bytearray(SUPERBLOCK.geometry.shard_bytes)
    image[: 2 * PAGE_BYTES] = encode_superblock(SUPERBLOCK)
    for segment, epoch, count, batches in (
        (0, 3, 1, (range(60), range(60, 61), range(61, 125))),
        (1, 3, 2, (range(200, 202),)),
        (1, 4, 3, (range(202, 205),)),
    ):
        made = generation(epoch=epoch, count=count)
        log = SummaryLog(SUPERBLOCK.geometry, SUPERBLOCK.identity, segment, made, OwnerEpoch(epoch))
        at = SUPERBLOCK.geometry.data_offset(segment)
        pieces = [*log.opening()]
        for batch in batches:
            blocks, offsets = [GoldenBlock(number) for number in batch], []
            for block in blocks:
                image[at : at + rounded_up(len(block.data))] = block.data.ljust(
                    rounded_up(len(block.data)), b"\0"
                )
                offsets.append(at)
                at += rounded_up(len(block.data))
            keys = np.frombuffer(b"".join(block.key for block in blocks), np.uint8).reshape(-1, 16)
            tags = np.frombuffer(b"".join(block.tag for block in blocks), np.uint8).reshape(-1, 16)
            seeds = np.array([block.seed for block in blocks], np.uint64)
            lengths = np.array([len(block.data) for block in blocks], np.uint32)
            pieces += log.append(entries_of(keys, tags, seeds, np.array(offsets, np.uint64), lengths))
        for offset, pages in pieces:
            image[offset : offset + len(pages)] = pages
    return bytes(image)


def of_version(version: int) -> bytes:
    """Return a superblock of another version, its checksum right."""
    page = bytearray(encode_superblock(SUPERBLOCK)[:PAGE_BYTES])
    struct.pack_into("<I", page, 8, version)
    struct.pack_into("<Q", page, 16, xxhash.xxh3_64_intdigest(bytes(page[:16] + page[24:])))
    return bytes(page) * 2


def damaged(at: int) -> bytes:
    """Return a superblock with one bit flipped, in both copies."""
    page = bytearray(encode_superblock(SUPERBLOCK)[:PAGE_BYTES])
    page[at] ^= 4
    return bytes(page) * 2


def images() -> dict[str, bytes]:
    """Return every golden image by its name, as today's code writes it."""
    good = encode_superblock(SUPERBLOCK)
    return {
        "shard": shard_image(),
        "superblock-good": good,
        "superblock-blank": bytes(2 * PAGE_BYTES),
        "superblock-foreign": b"\x53\xef" * PAGE_BYTES,
        "superblock-older": of_version(0),
        "superblock-newer": of_version(2),
        "superblock-first-page-wiped": bytes(PAGE_BYTES) + good[PAGE_BYTES:],
        "superblock-copy-wiped": good[:PAGE_BYTES] + bytes(PAGE_BYTES),
        **{f"superblock-damaged-{field}": damaged(at) for field, at in FIELDS.items()},
    }


def stored() -> dict[str, bytes]:
    """Return every golden image by its name, as it was kept."""
    return {
        file.name[: -len(".bin.z")]: zlib.decompress(file.read_bytes()) for file in FOLDER.glob("*.bin.z")
    }


def main() -> None:
    """Write those that are not there yet; never one that is."""
    FOLDER.mkdir(exist_ok=True)
    for name, image in images().items():
        file = FOLDER / f"{name}.bin.z"
        if not file.exists():
            file.write_bytes(zlib.compress(image, 9))


if __name__ == "__main__":
    main()
