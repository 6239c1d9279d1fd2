"""Blocks of caller memory: gather undoes scatter, and what can't be meant is refused."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca._memory.copy_pool import SHARE_BYTES, CopyPool
from ostraca._memory.host_blocks import Axes, HostBlocks, as_blocks, layout_of
from ostraca_fabric.errors import UsageError
from ostraca_fabric.tables.digests import CheckState, tag_of

BLOCK_BYTES = 1 << 16
SLOT_BYTES = BLOCK_BYTES + 4096
FAR_S = 60.0
UNTOUCHED = 0xEE
ALONE = CopyPool(1)


def checked(value: object, *, count: int, is_written: bool = True) -> HostBlocks:
    return as_blocks(value, argument="into", count=count, block_bytes=BLOCK_BYTES, is_written=is_written)


def seeds_of(count: int) -> NDArray[np.uint64]:
    return np.arange(7, 7 + count, dtype=np.uint64)


def slots_of(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Memory that holds slots out of order, and where they are."""
    return np.full(count * SLOT_BYTES, UNTOUCHED, np.uint8), np.arange(count)[::-1] * SLOT_BYTES


def gathered(blocks: HostBlocks) -> list[bytes]:
    """Gather all blocks, see that their tags are those of their bytes and that nothing else was written."""
    count = len(blocks.lengths)
    memory, offsets = slots_of(count)
    seeds = seeds_of(count)
    tags = blocks.gather(memory, offsets, seeds, first=0, copy_pool=ALONE)
    found = []
    for offset, length, seed, tag in zip(offsets, blocks.lengths, seeds, tags, strict=True):
        found.append(memory[offset : offset + length].tobytes())
        assert tag_of(found[-1], int(seed)) == tag.tobytes()
        memory[offset : offset + length] = UNTOUCHED
    assert (memory == UNTOUCHED).all()
    return found


def scattered(
    blocks: HostBlocks, payloads: list[bytes], *, until_s: float | None = None
) -> NDArray[np.bool_]:
    """Put payloads, under the tags that they should have, where their blocks belong, the last one first."""
    count = len(payloads)
    memory, offsets = slots_of(count)
    seeds = seeds_of(count)
    tags = [tag_of(payload, int(seed)) for payload, seed in zip(payloads, seeds, strict=True)]
    for offset, payload in zip(offsets, payloads, strict=True):
        memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
    column = np.array([np.frombuffer(tag, np.uint8) for tag in tags]).reshape(count, 16)
    verdicts = blocks.scatter(
        memory,
        offsets[::-1],
        seeds[::-1],
        column[::-1],
        positions=np.arange(count)[::-1],
        until_s=time.monotonic() + FAR_S if until_s is None else until_s,
        copy_pool=ALONE,
    )
    good: NDArray[np.bool_] = verdicts == CheckState.GOOD
    return good


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy a tensor's bytes, as torch orders them."""
    copied = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return copied.view(torch.uint8).numpy().tobytes()


@st.composite
def strided_parts(draw: st.DrawFn) -> NDArray[Any]:
    """Draw a writable slice of a larger array, of any type and order of axes."""
    dtype = draw(st.sampled_from(["u1", "<i2", "<f4", ">f8", "<c16", "V3", "V12", "S5"]))
    shape = draw(st.lists(st.integers(1, 3), max_size=6))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    margins = [draw(st.integers(0, 1)) for _ in shape]
    around = np.zeros(
        [size * step + margin for size, step, margin in zip(shape, steps, margins, strict=True)], dtype
    )
    cuts: tuple[Any, ...] = tuple(
        slice(*cut) for cut in zip(margins, [None] * len(shape), steps, strict=True)
    )
    return around[(*cuts, ...)].transpose(draw(st.permutations(range(len(shape)))))


@given(st.lists(st.lists(strided_parts(), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_what_is_scattered_is_gathered_again_whatever_the_strides(
    value: list[list[NDArray[Any]]], random: Any
) -> None:
    blocks = checked(value, count=len(value))
    put = [random.randbytes(int(length)) for length in blocks.lengths]
    assert scattered(blocks, put).all()
    assert gathered(blocks) == put
    assert [b"".join(part.tobytes() for part in block) for block in value] == put


@given(strided_parts().filter(lambda rows: rows.ndim > 1), st.randoms())
def test_rows_of_one_array_are_blocks_whatever_the_strides(rows: NDArray[Any], random: Any) -> None:
    blocks = checked(rows, count=len(rows))
    put = [random.randbytes(rows[0].nbytes) for _ in rows]
    assert scattered(blocks, put).all()
    assert gathered(blocks) == put
    assert [row.tobytes() for row in rows] == put


@given(st.data())
@settings(deadline=None)
def test_tensors_whatever_their_type_and_strides_are_as_arrays_of_the_same_bytes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    pool = torch.zeros([2 * size for size in shape], dtype=dtype)
    rows = pool[tuple(slice(None, None, 2) for _ in shape)].permute(order)
    blocks = checked(rows if data.draw(st.booleans()) else list(rows), count=len(rows))
    put = [np.random.default_rng(block).bytes(int(length)) for block, length in enumerate(blocks.lengths)]
    assert scattered(blocks, put).all()
    assert gathered(blocks) == put
    assert [bytes_of(row) for row in rows] == put


@given(strided_parts())
def test_parts_are_as_few_as_their_axes_allow_and_stay_within_their_memory(part: NDArray[Any]) -> None:
    axes = Axes(part.shape, part.strides, part.itemsize)
    layout = layout_of(axes)
    long = sum(size > 1 for size in part.shape)
    assert len(layout.parts) == 1 or long > 1
    assert layout.payload_bytes == part.nbytes
    runs, run_bytes = layout.parts["runs"].astype(np.int64), layout.parts["run_bytes"].astype(np.int64)
    ends = layout.parts["address"].astype(np.int64) + run_bytes + (runs - 1) * layout.parts["stride_bytes"]
    low, high = np.lib.array_utils.byte_bounds(part)
    assert ends.max() == axes.extent_bytes == high - low
    assert (runs * run_bytes).sum() == part.nbytes


@pytest.mark.parametrize("run_bytes", [1, 64, 256, 1024, 1025, 8192, 20000])
def test_runs_of_every_length_are_copied_as_they_are(run_bytes: int) -> None:
    """Short runs are put together before they are hashed, long ones go in pieces; blocks mix them."""
    pool = np.random.default_rng(1).integers(0, 255, (3, 2, run_bytes + 7), np.uint8)
    value = [[pool[block, :, 3 : run_bytes + 3], pool[block, 0, :2]] for block in range(3)]
    expected = [part[0].tobytes() + part[1].tobytes() for part in value]
    blocks = checked(value, count=3)
    assert gathered(blocks) == expected
    pool[:] = 0
    assert scattered(blocks, expected).all()
    assert gathered(blocks) == expected


def test_batches_too_large_for_the_caches_are_copied_past_them_just_as_exactly() -> None:
    count, length = 64, BLOCK_BYTES - 3
    pool = np.random.default_rng(2).integers(0, 255, (count, length + 5), np.uint8)
    blocks = checked(pool[:, 1 : length + 1], count=count)
    before = [row.tobytes() for row in pool[:, 1 : length + 1]]
    assert gathered(blocks) == before
    pool[:] = UNTOUCHED
    assert scattered(blocks, before).all()
    assert gathered(blocks) == before
    assert (pool[:, [0, *range(length + 1, length + 5)]] == UNTOUCHED).all()


def tagged_in_place(blocks: HostBlocks, positions: list[int], pool: CopyPool = ALONE) -> list[bytes]:
    """Return the tags of some blocks, each with the seed of its position."""
    at = np.array(positions, np.intp)
    tags = blocks.tags(at, seeds_of(len(blocks.lengths))[at], copy_pool=pool)
    return [tag.tobytes() for tag in tags]


def bytes_at(blocks: HostBlocks, positions: list[int]) -> list[bytes]:
    """Read some blocks at their addresses."""
    addresses = blocks.addresses(np.array(positions, np.intp))
    assert addresses.dtype == np.uint64
    return [
        ctypes.string_at(address, int(blocks.lengths[position]))
        for address, position in zip(addresses.tolist(), positions, strict=True)
    ]


def contiguous_values() -> dict[str, Any]:
    pool = np.random.default_rng(4).integers(0, 255, (4, 3000), np.uint8)
    fixed = pool.copy()
    fixed.flags.writeable = False
    mapped = pool.tobytes()
    return {
        "rows": pool,
        "rows with gaps between them": pool[::2, 100:2000],
        "tensor": torch.arange(4 * 99, dtype=torch.int32).reshape(4, 99),
        "one part each": [[pool[3, :7]], [pool[0]], [pool[1, 5:]]],
        "neighbouring axes": pool.reshape(4, 3, 10, 100),
        "read-only array": fixed,
        "buffers of any length": [mapped, memoryview(mapped)[5:9], bytearray(b"abc"), array.array("H", [1])],
        "a byte each": np.arange(5, dtype=np.uint8).reshape(5, 1),
    }


@pytest.mark.parametrize("kind", contiguous_values())
def test_blocks_of_a_single_run_are_named_and_tagged_where_they_are(kind: str) -> None:
    value = contiguous_values()[kind]
    blocks = checked(value, count=len(value), is_written=False)
    assert blocks.is_contiguous
    right = gathered(blocks)
    for positions in ([*range(len(right))], [len(right) - 1, 0], [1]):
        assert bytes_at(blocks, positions) == [right[position] for position in positions]
        tags = [tag_of(right[position], int(seeds_of(len(right))[position])) for position in positions]
        assert tagged_in_place(blocks, positions) == tags


def test_several_threads_make_the_same_tags() -> None:
    """Each thread takes a share, and the shares are those of many bytes."""
    count = 8 * SHARE_BYTES // BLOCK_BYTES
    pool = np.random.default_rng(6).integers(0, 255, (count, BLOCK_BYTES), np.uint8)
    blocks, backwards = checked(pool, count=count), [*range(count)][::-1]
    with contextlib.closing(CopyPool(3)) as shared:
        tags = tagged_in_place(blocks, backwards, shared)
    assert tags == [tag_of(pool[block].tobytes(), 7 + block) for block in backwards]


@pytest.mark.parametrize(
    "value",
    [
        [np.zeros((2, 8), np.uint8)[:, ::2]],
        [np.zeros((4, 8), np.uint8)[:, :4]],
        [torch.zeros(4, 8).T],
        [bytearray(4), [bytearray(3), bytearray(5)]],
        [bytearray(4), np.zeros((4, 8), np.uint8)[:, :4]],
    ],
    ids=["every other byte", "two axes with a gap", "transposed", "parts", "one of two"],
)
def test_blocks_with_gaps_or_parts_are_not_contiguous(value: list[Any]) -> None:
    assert not checked(value, count=len(value)).is_contiguous


def test_some_blocks_of_a_batch_are_gathered_from_the_first_one_named() -> None:
    value = [bytearray(b"abc"), [bytearray(b"d"), bytearray(b"e")], bytearray(b"fgh")]
    memory, offsets = slots_of(2)
    tags = checked(value, count=3).gather(memory, offsets, seeds_of(2), first=1, copy_pool=ALONE)
    assert memory[offsets[0] :][:2].tobytes() == b"de"
    assert memory[offsets[1] :][:3].tobytes() == b"fgh"
    assert [tag.tobytes() for tag in tags] == [tag_of(b"de", 7), tag_of(b"fgh", 8)]


def test_scattering_touches_nothing_between_the_strides() -> None:
    pool = np.full((4, 6), 7, np.uint8)
    assert scattered(checked([pool[1:3, ::2]], count=1), [bytes(6)]).all()
    assert pool.tolist() == [[7] * 6, [0, 7, 0, 7, 0, 7], [0, 7, 0, 7, 0, 7], [7] * 6]


def test_blocks_that_are_not_what_their_tags_say_leave_the_callers_memory_untouched() -> None:
    target = np.full((4, 100), UNTOUCHED, np.uint8)
    memory, offsets = slots_of(4)
    seeds, tags = seeds_of(4), np.zeros((4, 16), np.uint8)
    for block, (offset, seed) in enumerate(zip(offsets, seeds, strict=True)):
        payload = bytes([block]) * 100
        memory[offset : offset + 100] = block
        tags[block] = np.frombuffer(tag_of(payload, int(seed)), np.uint8)
    memory[offsets[1] + 50] ^= 1
    tags[2, 15] ^= 1
    blocks = checked(target, count=4)
    verdicts = blocks.scatter(
        memory,
        offsets,
        seeds,
        tags,
        positions=np.arange(4),
        until_s=time.monotonic() + FAR_S,
        copy_pool=ALONE,
    )
    assert verdicts.tolist() == [
        CheckState.GOOD,
        CheckState.DAMAGED,
        CheckState.DAMAGED,
        CheckState.GOOD,
    ]
    assert [set(row) for row in target.tolist()] == [{0}, {UNTOUCHED}, {UNTOUCHED}, {3}]


def test_no_block_is_begun_after_the_deadline() -> None:
    """However the clock runs: the blocks looked at are the first ones, and only these are written."""
    count = 64
    target = np.full((count, BLOCK_BYTES), UNTOUCHED, np.uint8)
    blocks, payloads = checked(target, count=count), [bytes(BLOCK_BYTES)] * count
    memory, offsets = slots_of(count)
    for offset, payload in zip(offsets, payloads, strict=True):
        memory[offset : offset + BLOCK_BYTES] = np.frombuffer(payload, np.uint8)
    seeds = seeds_of(count)
    tags = np.array([np.frombuffer(tag_of(payloads[0], int(seed)), np.uint8) for seed in seeds])
    handled = []
    for microseconds in range(0, 2_000, 10):
        target[:] = UNTOUCHED
        until_s = time.monotonic() + microseconds * 1e-6
        verdicts = blocks.scatter(
            memory, offsets, seeds, tags, positions=np.arange(count), until_s=until_s, copy_pool=ALONE
        )
        seen = int(verdicts.astype(np.bool_).sum())
        handled.append(seen)
        assert verdicts.tolist() == [CheckState.GOOD] * seen + [CheckState.PENDING] * (count - seen)
        assert not target[:seen].any()
        assert (target[seen:] == UNTOUCHED).all()
    assert handled[0] == 0
    assert any(0 < each < count for each in handled), handled


def test_a_slot_that_does_not_lie_in_the_memory_is_refused_and_nothing_is_written() -> None:
    target = np.full((2, 100), UNTOUCHED, np.uint8)
    blocks, memory = checked(target, count=2), np.zeros(300, np.uint8)
    for offset in (-1, 201, 1 << 62):
        offsets = np.array([0, offset])
        with pytest.raises(ValueError, match="outside of memory"):
            blocks.gather(memory, offsets, seeds_of(2), first=0, copy_pool=ALONE)
        with pytest.raises(ValueError, match="outside of memory"):
            blocks.scatter(
                memory,
                offsets,
                seeds_of(2),
                np.zeros((2, 16), np.uint8),
                positions=np.arange(2),
                until_s=1e9,
                copy_pool=ALONE,
            )
    assert not memory.any()
    assert (target == UNTOUCHED).all()


def test_memory_is_kept_as_long_as_its_blocks_are() -> None:
    source = np.full(64, 7, np.uint8)
    tensor = torch.full((64,), 9, dtype=torch.uint8)
    resized = bytearray(b"abc")
    gone = weakref.ref(source)
    blocks = checked([source, tensor, resized], count=3)
    del source, tensor
    gc.collect()
    with pytest.raises(BufferError):
        resized.append(0)
    assert gathered(blocks) == [b"\7" * 64, b"\11" * 64, b"abc"]
    del blocks
    gc.collect()
    resized.append(0)
    assert gone() is None


def test_a_tensor_that_requires_gradients_is_plain_memory() -> None:
    tensor = torch.ones(2, 8, requires_grad=True)
    assert gathered(checked(tensor, count=2)) == [np.ones(8, np.float32).tobytes()] * 2


def test_a_tensor_whose_storage_was_shrunk_is_refused() -> None:
    tensor = torch.ones(4, 8)
    tensor.untyped_storage().resize_(100)
    with pytest.raises(UsageError, match="freed or shrunk storage"):
        checked([tensor], count=1)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="freed or shrunk storage"):
        checked(tensor, count=4)


def test_dates_are_bytes_too() -> None:
    """Numpy exports no buffer of them."""
    dates = np.array(["2026-11-20", "2026-11-21"], "datetime64[D]")
    assert gathered(checked([dates], count=1)) == [dates.tobytes()]


def test_anything_with_the_buffer_protocol_is_a_block() -> None:
    value = [bytearray(b"abc"), memoryview(bytearray(b"de")), array.array("H", [1, 2]), np.array(5, "u1")]
    assert gathered(checked(value, count=4)) == [b"abc", b"de", b"\1\0\2\0", b"\5"]


def test_read_only_memory_is_a_source() -> None:
    assert gathered(checked([b"abc"], count=1, is_written=False)) == [b"abc"]


def test_blocks_beyond_every_u32_are_refused_as_too_long() -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1, 1 << 33), (1, 1))
    with pytest.raises(UsageError, match=f"{1 << 33} bytes, and blocks of this volume at most"):
        checked(rows, count=1)


def test_no_blocks_are_no_blocks() -> None:
    assert gathered(checked([], count=0)) == []
    assert gathered(checked(np.empty((0, 16), np.uint8), count=0)) == []


def _read_only() -> NDArray[np.uint8]:
    made = np.zeros(8, np.uint8)
    made.flags.writeable = False
    return made


@pytest.mark.parametrize(
    ("value", "count", "words"),
    [
        ([b"abc"], 1, "into\\[0\\] is read-only"),
        ([[bytearray(3), _read_only()]], 1, "into\\[0\\]\\[1\\] is read-only"),
        ([bytearray()], 1, "no bytes"),
        ([[]], 1, "into\\[0\\] is empty"),
        ([np.zeros(8)[::-1]], 1, "strides must be positive"),
        ([np.lib.stride_tricks.as_strided(np.zeros(8, "u1"), (4, 4), (0, 1), writeable=True)], 1, "strides"),
        ([np.lib.stride_tricks.as_strided(np.zeros(8, "u1"), (3, 4), (2, 1), writeable=True)], 1, "overlap"),
        ([torch.zeros(1, 4).expand(3, 4)], 1, "strides"),
        ([np.array([object()])], 1, "Python objects"),
        ([bytearray(BLOCK_BYTES + 1)], 1, f"{BLOCK_BYTES + 1} bytes, and blocks of this volume at most"),
        (np.zeros((1, BLOCK_BYTES + 8), np.uint8), 1, "larger block_bytes"),
        ([bytearray(4)], 2, "into has 1 blocks and the chain 2"),
        (np.zeros((3, 4)), 2, "3 blocks and the chain 2"),
        (bytearray(8), 1, "one flat piece of memory"),
        (np.zeros(8), 8, "one flat piece of memory"),
        (["abc"], 1, "into\\[0\\] is a str"),
        ([[bytearray(4), 5]], 1, "into\\[0\\]\\[1\\] is a int"),
        (5, 1, "into is a int"),
        (np.arange(8, dtype=np.uint8)[:, None][::-1], 8, "into has strides"),
        (bytes(8), 1, "one flat piece of memory"),
        (np.frombuffer(bytes(8), np.uint8).reshape(2, 4), 2, "into is read-only"),
        ([memoryview(bytearray(8)).cast("?"), 5], 2, "into\\[1\\] is a int"),
        ([torch.zeros(4, device="meta")], 1, "lies on meta: copy the tensor to the CPU"),
        ([torch.zeros(2, 2).to_sparse()], 1, "sparse"),
    ],
)
def test_memory_that_cannot_be_meant_is_refused_with_what_to_do(
    value: object, count: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        checked(value, count=count)
