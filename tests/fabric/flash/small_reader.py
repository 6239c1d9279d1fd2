"""A reader of shards, written from docs/reference/formats/flash-format.md alone, without code of Ostraca.

It reads a whole image from memory, one page at a time. ``xxhash`` is here because checksums are xxh3.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

PAGE = 4096


class NoShardError(Exception):
    """Neither page is a superblock; the message names what the first one is."""


@dataclass(frozen=True)
class Shard:
    fabric: bytes
    format_id: bytes
    shard_bytes: int
    segment_bytes: int
    first_segment: int
    segments: int
    summary_pages: int
    drive_offset: int
    enclosure: str
    drive: str
    shard: str


@dataclass(frozen=True)
class Block:
    segment: int
    generation: int
    key: bytes
    tag: bytes
    seed: int
    data: bytes


def superblock(image: bytes) -> Shard:
    names = []
    for page in (image[:PAGE], image[PAGE : 2 * PAGE]):
        name = what_it_is(page)
        if name == "good":
            numbers = struct.unpack_from("<QQQIIQ", page, 56)
            texts = [
                page[at : at + size].rstrip(b"\0").decode()
                for at, size in ((128, 64), (192, 128), (320, 160))
            ]
            return Shard(page[24:40], page[40:56], *numbers, *texts)
        names.append(name)
    raise NoShardError(names[1] if names[0] == "blank" else names[0])


def what_it_is(page: bytes) -> str:
    if len(page) < PAGE:
        return "cut short"
    if page == bytes(PAGE):
        return "blank"
    if page[:8] != b"OSTRACA\x1a":
        return "foreign"
    version, _, checksum = struct.unpack_from("<IIQ", page, 8)
    if xxhash.xxh3_64_intdigest(page[:16] + page[24:]) != checksum:
        return "damaged"
    return "good" if version == 1 else "older" if version < 1 else "newer"


def identity(shard: Shard) -> bytes:
    """Return the shard's digest, 16 bytes, and the seed of its checksums, 8 bytes."""
    named = shard.fabric + shard.format_id + shard.shard.encode()
    return hashlib.blake2b(named, digest_size=24, person=b"ostraca-shard").digest()


def pages_of(image: bytes, shard: Shard, segment: int) -> dict[tuple[int, int], tuple[int, bytes]]:
    """Map a segment's good pages: (generation, page number) to the highest sequence and its page."""
    digest = identity(shard)
    begin = shard.first_segment + segment * shard.segment_bytes
    pages: dict[tuple[int, int], tuple[int, bytes]] = {}
    for place in range(shard.summary_pages):
        page = image[begin + place * PAGE : begin + (place + 1) * PAGE]
        checksum, magic, version, _, owner, of_segment, number, generation, sequence = struct.unpack_from(
            "<Q8sII16sIIQQ", page
        )
        is_good = (magic, version, owner, of_segment) == (b"OSTRsumm", 1, digest[:16], segment)
        is_good &= checksum == xxhash.xxh3_64_intdigest(page[8:], seed=int.from_bytes(digest[16:], "little"))
        if is_good and (place < 2 or place - 2 == number):
            pages[generation, number] = max(pages.get((generation, number), (0, b"")), (sequence, page))
    return pages


def generations(image: bytes) -> dict[int, int]:
    """Return the generation of each segment ever written, also without listed blocks."""
    shard = superblock(image)
    pages = {segment: pages_of(image, shard, segment) for segment in range(shard.segments)}
    return {segment: max(generation for generation, _ in each) for segment, each in pages.items() if each}


def blocks(image: bytes) -> Iterator[Block]:
    """Every block that is to be believed, but for what its tag has to say."""
    shard = superblock(image)
    for segment in range(shard.segments):
        begin = shard.first_segment + segment * shard.segment_bytes
        data = range(begin + shard.summary_pages * PAGE, begin + shard.segment_bytes)
        pages = pages_of(image, shard, segment)
        newest = max((generation for generation, _ in pages), default=0)
        extents: list[tuple[int, int, Block]] = []
        for (generation, _), (_, page) in sorted(pages.items()):
            for at in (
                range(96, 96 + 80 * struct.unpack_from("<I", page, 20)[0], 80) if generation == newest else ()
            ):
                key, tag, seed, first_page, length = struct.unpack_from("<16s16sQII", page, at)
                offset, end = first_page * PAGE, first_page * PAGE + length
                if offset in data and length and end <= data.stop:
                    extents.append((offset, end, Block(segment, newest, key, tag, seed, image[offset:end])))
        for offset, end, block in extents:
            if sum(offset < other_end and other < end for other, other_end, _ in extents) == 1:
                yield block


def volumes(image: bytes) -> list[dict[str, object]]:
    """Return a shard's volume records from the good copy written last."""
    shard = superblock(image)
    digest = identity(shard)
    room = (shard.first_segment - 2 * PAGE) // 2 // PAGE * PAGE
    good = []
    for begin in (2 * PAGE, 2 * PAGE + room):
        checksum, magic, version, count, owner, epoch, sequence, size, _ = struct.unpack_from(
            "<Q8sII16sQQII", image, begin
        )
        covered = image[begin + 8 : begin + min(room, 64 + size)]
        if (magic, version, owner) == (b"OSTRvols", 1, digest[:16]) and checksum == xxhash.xxh3_64_intdigest(
            covered, seed=int.from_bytes(digest[16:], "little")
        ):
            records = json.loads(covered[56:])
            assert len(records) == count
            good.append(((epoch, sequence), records))
    return max(good, default=((0, 0), []))[1]
