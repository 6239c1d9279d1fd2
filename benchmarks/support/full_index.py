"""Full indexes of shards."""

from __future__ import annotations

import numpy as np

from ostraca_fabric.flash.index import BlockIndex
from ostraca_fabric.model.extent import PAGE_BYTES

_SEGMENT_BLOCKS = 1024


def keys_from(first: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the keys of *count* blocks from number *first*: reproducible, and spread like hashes."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    words = np.empty((count, 2), np.uint64)
    for word, salt in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        mixed = (numbers + np.uint64(salt)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        words[:, word] = mixed ^ (mixed >> np.uint64(31))
    return words.view(np.uint8).reshape(count, 16)


def full_index(blocks: int) -> BlockIndex:
    """Build a full index of *blocks* blocks of one page, in segments of 1024."""
    segments = -(-blocks // _SEGMENT_BLOCKS)
    index = BlockIndex(blocks_max=blocks, segments=segments)
    for segment in range(segments):
        first = segment * _SEGMENT_BLOCKS
        count = min(_SEGMENT_BLOCKS, blocks - first)
        keys = keys_from(first, count)
        offsets = np.arange(first, first + count, dtype=np.uint64) * np.uint64(PAGE_BYTES)
        index.insert(keys, keys[:, ::-1], offsets, np.full(count, PAGE_BYTES, np.uint32), segment=segment)
    return index
