"""Tags of blocks in a GPU's memory, as Triton kernels.

The tags are those of ``ostraca_fabric.tables.digests``: XXH3 128 bits with a seed, from the xxHash
specification (doc/xxhash_spec.md of github.com/Cyan4973/xxHash), for inputs of more than 240 bytes. The
import needs triton. As in ``ostraca._memory.cuda``, torch is never imported: a tensor implies its import.

XXH3 scrambles its eight accumulators after each KiB, so each KiB of a block depends on the earlier ones. The
sums within a KiB do not. Hence two kernels:

- ``_sum_groups`` reads all bytes. Each program sums the stripes of eight groups, of a KiB each, in eight
  lanes. All groups of a wave are independent.
- ``_finish`` runs the sums of a block through the scrambles, adds the last stripe, and merges the
  accumulators. Each block is a chain of a dozen instructions per KiB; blocks are independent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from ostraca_fabric.tables.digests import TAG_BYTES, tags_of

LENGTH_MIN = 241
"""Shortest block: XXH3 hashes shorter inputs by other rules."""

ALIGNMENT = 16
"""Blocks begin at multiples of so many bytes."""

_STRIPE = tl.constexpr(64)
_TILE = 8
"""Groups per program of ``_sum_groups``: 8 KiB, eight words for each of 128 threads."""

_GROUP_BYTES = 1024
"""Sixteen stripes, between two scrambles."""

_SUMS = 16
"""Words per group: eight sums of products, and eight of swapped words."""

_UNROLLED = tl.constexpr(8)
"""Groups per turn of ``_finish``: their sums are loaded ahead of the chain."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret: 24 words, little-endian."""

_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
_START = (
    0xC2B2AE3D,  # XXH_PRIME32_3
    0x9E3779B185EBCA87,  # XXH_PRIME64_1 to 4
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,  # XXH_PRIME32_2
    0x27D4EB2F165667C5,  # XXH_PRIME64_5
    0x9E3779B1,  # XXH_PRIME32_1
)

_CONSTANTS: NDArray[np.uint64] = np.concatenate(
    [np.frombuffer(_SECRET, "<u8").astype(np.uint64), np.array(_START, np.uint64)]
)
"""Head of a kernel's table: the secret, and the accumulators' first values."""

_HEAD = tl.constexpr(len(_CONSTANTS))
_COLUMNS = tl.constexpr(4)
"""Row of a block in the table: position, length, seed, and number of the first group in the wave."""


def new_memory(torch: Any, device: Any, memory_bytes: int, blocks: int) -> tuple[Any, Any]:  # noqa: ANN401 (tensors)
    """Return tensors of the current stream: memory for so many blocks, and for the sums of their groups.

    Raises OutOfMemoryError of torch.
    """
    memory = torch.empty(-(-memory_bytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
    groups = memory_bytes // _GROUP_BYTES + blocks
    return memory, torch.empty((groups, _SUMS), dtype=torch.int64, device=device)


def tags_on_device(
    memory: Any,  # noqa: ANN401 (torch is never imported here)
    sums: Any,  # noqa: ANN401
    positions: NDArray[np.int64],
    lengths: NDArray[np.uint32],
    seeds: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """Return the tags of blocks in *memory*, a flat tensor of bytes: shape (n, 16).

    Positions, lengths and seeds have shape (n,). Memory and *sums* come from ``new_memory``. Runs on the
    current device and stream, and waits for the tags. Raises the errors of torch and triton.
    """
    assert len(positions) == len(lengths) == len(seeds), "a block has one position, length and seed"
    ends = positions + lengths.astype(np.int64)
    assert (lengths >= LENGTH_MIN).all(), "short blocks are hashed by other rules"
    assert not (positions % ALIGNMENT).any(), "blocks are aligned"
    assert (positions >= 0).all(), "blocks lie inside of memory"
    assert (ends <= memory.numel()).all(), "blocks lie inside of memory"
    count = len(positions)
    tags = np.empty((count, TAG_BYTES), np.uint8)
    if not count:
        return tags
    groups = (lengths.astype(np.int64) - 1) // _GROUP_BYTES + 1
    table = np.empty(len(_CONSTANTS) + 4 * count, np.uint64)
    table[: len(_CONSTANTS)] = _CONSTANTS
    rows = table[len(_CONSTANTS) :].reshape(count, 4)
    rows[:, 0], rows[:, 1], rows[:, 2] = positions, lengths, seeds
    rows[:, 3] = np.cumsum(groups) - groups
    on_device = sums.new_tensor(table.view(np.int64))
    assert len(sums) >= groups.sum(), "each group has sums"
    found = sums.new_empty((count, 2))
    tiles = -(-int(groups.max()) // _TILE)
    _sum_groups[(count, tiles)](
        memory.view(sums.dtype), on_device, sums, TILE=_TILE, num_warps=4, enable_fp_fusion=False
    )
    _finish[(count,)](memory, on_device, sums, found, num_warps=1, enable_fp_fusion=False)
    tags[:] = found.cpu().numpy().view(np.uint64).astype(">u8").view(np.uint8)
    return tags


def check_device(torch: Any, device: Any) -> bool:  # noqa: ANN401 (torch is never imported here)
    """Compile the kernels; tell whether the tags of *device* equal those of the host.

    Takes seconds for the first time on a machine. Runs and raises as ``tags_on_device``.
    """
    random = np.random.default_rng(1)
    lengths = np.array([241, 1024, 1025, 1088, 9 * 1024 + 63], np.uint32)
    ends = np.cumsum((lengths.astype(np.int64) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
    positions = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    content = random.integers(0, 256, int(ends[-1]), np.uint8)
    seeds = random.integers(0, 1 << 64, len(lengths), np.uint64)
    memory, sums = new_memory(torch, device, len(content), len(lengths))
    memory.copy_(torch.from_numpy(content))
    found = tags_on_device(memory, sums, positions, lengths, seeds)
    return np.array_equal(found, tags_of(content, positions, lengths, seeds))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _secret_word(table: tl.tensor, number: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return words of the secret for a seed."""
    word = tl.load(table + number).to(tl.uint64, bitcast=True)
    return tl.where(number % 2 == 0, word + seed, word - seed)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_groups(words: tl.tensor, table: tl.tensor, sums: tl.tensor, TILE: tl.constexpr) -> None:  # noqa: N803
    """Sum the stripes of each KiB: eight sums of products, then eight of swapped words."""
    block = tl.program_id(0).to(tl.int64)
    row = table + _HEAD + _COLUMNS * block
    first_word = tl.load(row) // 8
    stripes = (tl.load(row + 1) - 1) // _STRIPE
    seed = tl.load(row + 2).to(tl.uint64, bitcast=True)
    first_group = tl.load(row + 3)
    group = tl.program_id(1) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, 16)
    lane = tl.arange(0, 8)
    stripe = group[:, None] * 16 + step[None, :]
    at = first_word + stripe[:, :, None] * 8 + lane[None, None, :]
    is_inside = (stripe < stripes)[:, :, None]
    word = tl.load(words + at, mask=is_inside, other=0).to(tl.uint64, bitcast=True)
    key = _secret_word(table, step[:, None] + lane[None, :], seed)
    keyed = word ^ key[None, :, :]
    product = tl.where(is_inside, (keyed & 0xFFFFFFFF) * (keyed >> 32), 0)
    out = sums + (first_group + group)[:, None] * 16
    is_group = (group <= stripes // 16)[:, None]
    tl.store(out + lane[None, :], tl.sum(product, 1).to(tl.int64, bitcast=True), mask=is_group)
    tl.store(out + 8 + (lane ^ 1)[None, :], tl.sum(word, 1).to(tl.int64, bitcast=True), mask=is_group)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _merge(acc: tl.tensor, key: tl.tensor, start: tl.tensor) -> tl.tensor:
    """Merge eight accumulators into a half of the hash."""
    left, right = tl.split(tl.reshape(acc ^ key, [4, 2]))
    half = start + tl.sum((left * right) ^ tl.umulhi(left, right), 0)
    half = (half ^ (half >> 37)) * _PRIME_MX1
    return half ^ (half >> 32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _finish(memory: tl.tensor, table: tl.tensor, sums: tl.tensor, found: tl.tensor) -> None:
    """Scramble after each KiB, add the last stripe, and merge."""
    block = tl.program_id(0).to(tl.int64)
    row = table + _HEAD + _COLUMNS * block
    position = tl.load(row)
    length = tl.load(row + 1)
    seed = tl.load(row + 2).to(tl.uint64, bitcast=True)
    lane = tl.arange(0, 8)
    acc = tl.load(table + 24 + lane).to(tl.uint64, bitcast=True)
    scramble = _secret_word(table, 16 + lane, seed)
    full_groups = (length - 1) // 1024
    group_sums = sums + tl.load(row + 3) * 16 + lane
    for first in range(0, full_groups + 1, _UNROLLED):
        for step in tl.static_range(_UNROLLED):
            group = tl.full([8], first + step, tl.int64)
            at = group_sums + group * 16
            is_group = group <= full_groups
            product = tl.load(at, mask=is_group, other=0).to(tl.uint64, bitcast=True)
            swapped = tl.load(at + 8, mask=is_group, other=0).to(tl.uint64, bitcast=True)
            acc = acc + product + swapped
            scrambled = (acc ^ (acc >> 47) ^ scramble) * _PRIME32_1
            acc = tl.where(group < full_groups, scrambled, acc)
    # The last 64 bytes may begin anywhere, so they are loaded as bytes.
    byte = tl.arange(0, 8)
    last = memory + position + length - _STRIPE + byte[None, :]
    shift = (8 * byte[None, :]).to(tl.uint64)
    word = tl.sum(tl.load(last + 8 * lane[:, None]).to(tl.uint64) << shift, 1)
    swapped = tl.sum(tl.load(last + 8 * (lane ^ 1)[:, None]).to(tl.uint64) << shift, 1)
    # Keys lie at byte 121 of the secret; below, at 11 and 117: between words.
    key = (_secret_word(table, 15 + lane, seed) >> 8) | (_secret_word(table, 16 + lane, seed) << 56)
    keyed = word ^ key
    acc = acc + swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32)
    size = length.to(tl.uint64, bitcast=True)
    key = (_secret_word(table, 1 + lane, seed) >> 24) | (_secret_word(table, 2 + lane, seed) << 40)
    low = _merge(acc, key, size * _PRIME64_1)
    key = (_secret_word(table, 14 + lane, seed) >> 40) | (_secret_word(table, 15 + lane, seed) << 24)
    high = _merge(acc, key, ~(size * _PRIME64_2))
    tl.store(found + 2 * block, high.to(tl.int64, bitcast=True))
    tl.store(found + 2 * block + 1, low.to(tl.int64, bitcast=True))
