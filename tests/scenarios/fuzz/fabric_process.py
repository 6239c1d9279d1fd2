"""A small fabric as a process of its own, whose memory and last words can be looked at.

``python -m tests.scenarios.fuzz.fabric_process DIRECTORY`` prints its address, serves until its standard
input ends,
and exits with 0 only when all that it began has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop
from tests.support.fabric.fabric_host import MIB

from ostraca_cli.composition.embedded import EmbeddedFabric, FabricPlan

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
READY_S = 60.0
SIGNS_OF_A_BUG = ("Traceback", "bug in Ostraca", "Exception in callback", "never retrieved", "never awaited")


class FabricProcess:
    """The fabric, started by ``with``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log_path = directory / "log"
        self.address = ""

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.scenarios.fuzz.fabric_process",
                    str(self._directory / "fabric"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().decode().strip()
        assert self.address, f"the fabric did not start: {self.log()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            code = self._process.wait(READY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        if error is None:
            assert code == 0, f"the fabric exited with {code}: {self.log()[-4000:]}"
            self.check_log()

    @property
    def resident_bytes(self) -> int:
        """The memory it holds now."""
        return resident_bytes(self._process.pid)

    def log(self) -> str:
        """Return what it has logged."""
        return self._log_path.read_text(errors="replace")

    def check(self) -> None:
        """Assert that it lives and has not said that something is wrong with it."""
        assert self._process.poll() is None, f"the fabric died: {self.log()[-4000:]}"

    def check_log(self) -> None:
        """Assert that nothing in the log is a bug, or was put there by someone else."""
        lines = self.log().split("\n")
        for number, line in enumerate(lines):
            if any(sign in line for sign in SIGNS_OF_A_BUG):
                raise AssertionError("\n".join(lines[max(0, number - 3) : number + 40]))
            assert not line or line.startswith("fabric "), f"a line that the fabric did not begin: {line!r}"
            assert len(line) < 2000, f"a line of {len(line)} bytes: {line[:200]!r}"


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds; 0 stands for this one."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * PAGE_BYTES


async def _serve(directory: Path) -> bool:
    plan = FabricPlan(
        directory=directory,
        capacity_bytes=2 * (4 * 64 + 1) * MIB,
        dram_bytes=8 * MIB,
        staging_bytes=64 * MIB,
        transports=("inline",),
    )
    fabric = EmbeddedFabric(plan)
    await fabric.start()
    print(fabric.addresses[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    return await fabric.stop()


def main() -> int:
    """Run until standard input ends."""
    logging.basicConfig(level=logging.INFO, format="fabric %(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 0 if runner.run(_serve(Path(sys.argv[1]))) else 1


if __name__ == "__main__":
    sys.exit(main())
