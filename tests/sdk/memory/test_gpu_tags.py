"""Tags of the Triton kernels: on a GPU if torch finds one, else by Triton's interpreter on the CPU.

``make test-gpu`` brings triton.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from ostraca_fabric.tables.digests import tags_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is installed in an environment of its own only (make test-gpu)")

from ostraca._memory import gpu_tags  # noqa: E402 (needs triton)

LENGTHS = st.integers(gpu_tags.LENGTH_MIN, 700) | st.integers(0, 80).map(lambda rest: 8 * 1024 - 8 + rest)
"""Around the shortest block, and around ends of groups and of a program's groups."""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ostraca._memory import gpu_tags
for kernel, types, constants in (
    (gpu_tags._sum_groups, ("*i64", "*i64", "*i64", "constexpr"), {(3,): gpu_tags._TILE}),
    (gpu_tags._finish, ("*u8", "*i64", "*i64", "*i64"), {}),
):
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types)), constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    print(len(triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["cubin"]))
"""


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(LENGTHS, st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 1 << 32))
def test_blocks_of_any_length_have_the_tags_of_the_host(blocks: list[tuple[int, int]], draw: int) -> None:
    random = np.random.default_rng(draw)
    lengths = np.array([length for length, _ in blocks], np.uint32)
    gaps = np.array([gap for _, gap in blocks], np.int64) * gpu_tags.ALIGNMENT
    ends = np.cumsum(-(-lengths.astype(np.int64) // 16) * 16 + gaps)
    positions = ends - -(-lengths.astype(np.int64) // 16) * 16
    seeds = random.integers(0, 1 << 64, len(blocks), np.uint64)
    content = random.integers(0, 256, int(ends[-1]), np.uint8)
    memory, sums = gpu_tags.new_memory(torch, DEVICE, len(content), len(blocks))
    memory.copy_(torch.from_numpy(content))
    found = gpu_tags.tags_on_device(memory, sums, positions, lengths, seeds)
    assert np.array_equal(found, tags_of(content, positions, lengths, seeds))
    first = content[positions[0] : positions[0] + lengths[0]]
    assert found[0].tobytes() == xxh3_128_digest(first.tobytes(), int(seeds[0]))
    assert np.array_equal(memory.cpu().numpy(), content)


def test_a_device_with_the_tags_of_the_host_passes_the_check() -> None:
    assert gpu_tags.check_device(torch, DEVICE)


def test_a_device_with_other_tags_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tags, "_CONSTANTS", gpu_tags._CONSTANTS ^ np.uint64(1))
    assert not gpu_tags.check_device(torch, DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU that torch can use here")
def test_a_gpu_tags_waves_of_large_blocks_at_100_gb_per_second() -> None:
    lengths = np.full(32, 1 << 20, np.uint32)
    positions = np.arange(32, dtype=np.int64) << 20
    seeds = np.arange(32, dtype=np.uint64)
    memory, sums = gpu_tags.new_memory(torch, DEVICE, 32 << 20, 32)
    memory.random_(0, 256)
    expected = tags_of(memory.cpu().numpy(), positions, lengths, seeds)
    took_s = []
    for _ in range(20):
        begun_s = time.perf_counter()
        found = gpu_tags.tags_on_device(memory, sums, positions, lengths, seeds)
        took_s.append(time.perf_counter() - begun_s)
        assert np.array_equal(found, expected)
    print(f"{memory.nbytes / statistics.median(took_s) / 1e9:.0f} GB/s, launches and results included")
    assert memory.nbytes / statistics.median(took_s) >= 100e9


def test_the_kernels_compile_for_a_gpu_without_one(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    assert len(compiled.stdout.split()) == 2
