"""Fabrics to test against: one on a thread of this process, and one as a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from tests.support.fabric.warm_process import StartedProcess, started

import ostraca
from ostraca.settings import ClientSettings
from ostraca_cli.composition.embedded import FabricPlan
from ostraca_cli.testing import FabricThread as InProcessFabric

if TYPE_CHECKING:
    from types import TracebackType

MIB = 1 << 20
LAYOUT = ostraca.Layout(
    model="test-model",
    dtype="bf16",
    page_tokens=16,
    groups=(ostraca.KvGroup(8, 8, 128),) * 2,
    tensor_parallel=2,
)
BLOCK_BYTES = 256 * 1024

SMALL = ClientSettings(arena_bytes=32 * MIB, chunk_bytes=4 * MIB, transports=("inline",), direct_memory=False)
"""Settings of clients to which agents bring all blocks."""


class FabricThread(InProcessFabric):
    """A fabric on an event loop of its own in this process, with clients of the tests' settings."""

    def connect(self, settings: ClientSettings = SMALL, *, tenant: str = "default") -> ostraca.Client:
        return ostraca.connect(self.addresses, settings=settings, tenant=tenant)

    def await_writes(self) -> None:
        """Wait until all puts are on flash."""
        until_s = time.monotonic() + 20
        while any(agent.staging_used_bytes for agent in self.status()):
            assert time.monotonic() < until_s, "blocks stay staged"
            time.sleep(0.005)

    def damage(self, block: NDArray[np.uint8]) -> None:
        """Change a block's bytes on flash, once its put is written."""
        self.await_writes()
        overwrite(*find_on_flash(self.plan, block), b"\x00" * 64)


class FabricProcess:
    """``ostraca up`` as a process."""

    def __init__(
        self, directory: Path, *arguments: str, log: Path | None = None, is_apart: bool = False
    ) -> None:
        """Start the process.

        *log* receives stderr; the default lies beside the directory. A process that *is_apart* does not get
        the terminal's Ctrl-C.
        """
        self.directory = directory
        self._arguments = arguments
        self._is_apart = is_apart
        self.process: StartedProcess | None = None
        self.address = ""
        self.log = log or directory.with_name(f"{directory.name}.log")

    def check_log(self) -> None:
        """Assert that nothing crashed."""
        words = self.log.read_text()
        assert "Traceback" not in words, words
        assert "bug" not in words, words

    def start(self) -> Self:
        self.launch()
        return self.await_ready()

    def launch(self) -> None:
        """Begin to start: for who ends it before it is ready. ``kill``, or ``await_ready``, comes next."""
        words = ("up", "--dir", str(self.directory), *self._arguments)
        self.process = started(*words, log=self.log, is_apart=self._is_apart)

    def await_ready(self) -> Self:
        assert self.process is not None
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        found = re.search(r"unix://[^\"']+", ready)
        assert found, f"no ready line: {ready!r}, exit code {self.process.poll()}: {self.log.read_text()}"
        self.address = found.group()
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        self.signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.kill()


def volume_of(client: ostraca.Client, name: str = "v") -> ostraca.Volume:
    return client.volume(name, LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def hashes(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)]


def content(count: int, seed: int = 0, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """Distinct blocks, shape (count, block_bytes)."""
    words = np.random.default_rng(seed + 1000).integers(0, 1 << 64, (count, -(-block_bytes // 8)), np.uint64)
    return np.ascontiguousarray(words.view(np.uint8)[:, :block_bytes])


def empty(count: int, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """Memory that no block's content equals."""
    return np.full((count, block_bytes), 0xEE, np.uint8)


def drive_files(plan: FabricPlan | Path) -> list[Path]:
    directory = plan if isinstance(plan, Path) else plan.directory
    return sorted(path for path in directory.glob("enclosure-*/*") if path.stat().st_size >= MIB)


def find_on_flash(plan: FabricPlan | Path, block: NDArray[np.uint8]) -> tuple[Path, int]:
    """Return the drive file and offset at which a block's bytes lie."""
    needle = block[:64].tobytes()
    for path in drive_files(plan):
        with path.open("rb") as file:
            at = 0
            while piece := file.read(32 * MIB):
                found = piece.find(needle)
                if found >= 0:
                    return path, at + found
                at += len(piece)
    raise AssertionError("the block is not on flash")


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Change bytes behind the fabric's back, so that O_DIRECT reads see them."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_with_noise(directory: Path) -> None:
    """Overwrite all written data on the drives, also for cached reads."""
    dice = random.Random(2)
    for path in drive_files(directory):
        with path.open("r+b") as file:
            descriptor, at, end = file.fileno(), 0, path.stat().st_size
            while at < end:
                try:
                    at = os.lseek(descriptor, at, os.SEEK_DATA)
                except OSError:
                    break
                hole = os.lseek(descriptor, at, os.SEEK_HOLE)
                os.pwrite(descriptor, dice.randbytes(min(MIB, hole - at)), at)
                at += min(MIB, hole - at)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def with_dram(plan: FabricPlan, dram_bytes: int) -> FabricPlan:
    return replace(plan, dram_bytes=dram_bytes)
