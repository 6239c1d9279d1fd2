"""Blocks of caller memory: gather undoes scatter, and what can't be meant is refused."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ostraca.parts import PartBlocks, RowBlocks, as_blocks
from ostraca_fabric.errors import UsageError

BLOCK_BYTES = 1 << 16


def checked(value: object, *, count: int, is_written: bool = True) -> RowBlocks | PartBlocks:
    return as_blocks(value, what="into", count=count, block_bytes=BLOCK_BYTES, is_written=is_written)


def gathered(blocks: RowBlocks | PartBlocks) -> list[bytes]:
    slots = [np.zeros(length, np.uint8) for length in blocks.lengths]
    for block, slot in enumerate(slots):
        blocks.gather(block, slot)
    return [slot.tobytes() for slot in slots]


@st.composite
def strided_parts(draw: st.DrawFn) -> NDArray[Any]:
    """A writable array of some type, cut out of a larger one, maybe with its axes in another order."""
    dtype = draw(st.sampled_from(["u1", "<i2", "<f4", "<f8", "<c16", "V3"]))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    around = np.zeros([size * step + 1 for size, step in zip(shape, steps, strict=True)], dtype)
    cut = around[tuple(slice(1, None, step) for step in steps)]
    return cut.transpose(draw(st.permutations(range(len(shape)))))


@given(st.lists(st.lists(strided_parts(), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms())
def test_what_is_scattered_is_gathered_again_whatever_the_strides(
    value: list[list[NDArray[Any]]], random: Any
) -> None:
    blocks = checked(value, count=len(value))
    put = [random.randbytes(int(length)) for length in blocks.lengths]
    for block, payload in enumerate(put):
        blocks.scatter(block, np.frombuffer(payload, np.uint8))
    assert gathered(blocks) == put
    assert [b"".join(part.tobytes() for part in block) for block in value] == put
    assert [b"".join(blocks.pieces(block)) for block in range(len(put))] == put


def test_scattering_touches_nothing_between_the_strides() -> None:
    pool = np.full((4, 6), 7, np.uint8)
    checked([pool[1:3, ::2]], count=1).scatter(0, np.zeros(6, np.uint8))
    assert pool.tolist() == [[7] * 6, [0, 7, 0, 7, 0, 7], [0, 7, 0, 7, 0, 7], [7] * 6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int8])
def test_a_torch_tensor_keeps_its_bits_in_types_that_numpy_lacks(dtype: torch.dtype) -> None:
    pool = torch.arange(0, 96, dtype=torch.float32).reshape(4, 24).to(dtype)
    block = pool[:, 4:20]
    expected = block.contiguous().view(torch.uint8).numpy().tobytes()
    assert gathered(checked([[block]], count=1)) == [expected]
    target = torch.zeros_like(pool)
    checked([[target[:, 4:20]]], count=1).scatter(0, np.frombuffer(expected, np.uint8))
    assert torch.equal(target[:, 4:20].view(torch.uint8), block.contiguous().view(torch.uint8))


def test_a_tensor_that_requires_gradients_is_plain_memory() -> None:
    tensor = torch.ones(2, 8, requires_grad=True)
    assert gathered(checked(tensor, count=2)) == [np.ones(8, np.float32).tobytes()] * 2


def test_one_array_of_contiguous_rows_costs_no_object_per_block() -> None:
    rows = np.arange(48, dtype=np.uint16).reshape(6, 2, 4)[::2]
    blocks = checked(rows, count=3)
    assert isinstance(blocks, RowBlocks)
    assert gathered(blocks) == [row.tobytes() for row in rows]
    blocks.scatter(1, np.zeros(16, np.uint8))
    assert not rows[1].any()
    assert rows[0].any()


def test_one_array_of_strided_rows_is_taken_as_parts() -> None:
    rows = np.arange(64, dtype=np.uint16).reshape(4, 16)[:, ::2]
    assert gathered(checked(rows, count=4)) == [row.tobytes() for row in rows]


def test_anything_with_the_buffer_protocol_is_a_block() -> None:
    value = [bytearray(b"abc"), memoryview(bytearray(b"de")), array.array("H", [1, 2])]
    assert gathered(checked(value, count=3)) == [b"abc", b"de", b"\1\0\2\0"]


def test_read_only_memory_is_a_source() -> None:
    assert gathered(checked([b"abc"], count=1, is_written=False)) == [b"abc"]


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
        ([bytearray(BLOCK_BYTES + 1)], 1, f"{BLOCK_BYTES + 1} bytes, and blocks of this volume have at most"),
        (np.zeros((1, BLOCK_BYTES + 8), np.uint8), 1, "larger block_bytes"),
        ([bytearray(4)], 2, "into has 1 blocks and the chain 2"),
        (np.zeros((3, 4)), 2, "3 blocks and the chain 2"),
        (bytearray(8), 1, "one flat piece of memory"),
        (np.zeros(8), 8, "one flat piece of memory"),
        (["abc"], 1, "into\\[0\\] is a str"),
        ([[bytearray(4), 5]], 1, "into\\[0\\]\\[1\\] is a int"),
        (5, 1, "into is a int"),
        ([torch.zeros(4, device="meta")], 1, "lies on meta: copy it to the CPU"),
        ([torch.zeros(2, 2).to_sparse()], 1, "sparse"),
    ],
)
def test_memory_that_cannot_be_meant_is_refused_with_what_to_do(
    value: object, count: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        checked(value, count=count)
