"""How bytes of tensors are told apart and ordered, which is the same on every device: here on the CPU's.

Streams, pinning and the GPU itself are in ``tests/contract/devices/test_devices.py``, for machines that
have one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostraca._memory.cuda import CudaDevices, part_of, read, write
from ostraca_fabric.errors import UsageError

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.uint8)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_bytes_of_any_type_and_stride_are_read_and_written_in_c_order(
    dtype: torch.dtype, axes: list[tuple[int, int]], shift: int, is_turned: bool
) -> None:
    pool = torch.zeros([size * step for size, step in axes], dtype=dtype)
    tensor = pool[tuple(slice(None, None, step) for _, step in axes)]
    tensor = tensor.movedim(0, -1) if is_turned else tensor
    part = part_of(tensor, torch)
    content = np.random.default_rng(shift).integers(0, 2, part.payload_bytes, np.uint8)
    host = np.zeros(shift + part.payload_bytes, np.uint8)  # where no item of the type may begin
    host[shift:] = content
    write(part.memory, torch.from_numpy(host[shift:]), torch)
    copied = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    assert copied.view(-1).view(torch.uint8).numpy().tobytes() == content.tobytes()
    back = np.zeros_like(host)
    read(part.memory, torch.from_numpy(back[shift:]), torch)
    assert np.array_equal(back, host)
    flat = pool.view(-1).view(torch.uint8).numpy()
    assert np.count_nonzero(flat) == np.count_nonzero(content), "nothing beside it was written"


def test_tensors_that_want_gradients_and_those_of_inference_are_written_too() -> None:
    trained = torch.zeros(2, 8, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.zeros(2, 8)
    host = torch.arange(32, dtype=torch.uint8)
    for tensor in (trained, inferred):
        rows = CudaDevices().rows(part_of(tensor, torch))
        assert [(row.shape, row.payload_bytes) for row in rows] == [((8,), 32)] * 2
        with torch.inference_mode():
            write(rows[1].memory, host, torch)
        assert tensor.detach()[1].view(torch.uint8).tolist() == list(range(32))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(3, 0), "no bytes"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(1, 4).expand(3, 4), "strides"),
    ],
)
def test_tensors_that_are_no_plain_memory_are_refused(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        part_of(tensor, torch)


def test_tensors_of_the_cpu_are_left_to_others() -> None:
    assert CudaDevices().look(torch.zeros(8)) is None
    assert CudaDevices().close()
