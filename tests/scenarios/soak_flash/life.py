"""The lives of one fabric: started on one directory again and again, each ended by SIGKILL or a power cut."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.scenarios.soak_flash.disk import PowerCutDisk
from tests.support.fabric.fabric_host import FabricProcess

START_S = 60.0
"""A fabric that is not ready by then does not start."""


class StartError(Exception):
    """The fabric did not start, or does not serve."""


@dataclass
class Lives:
    """A fabric's directory, on a disk whose power is cut, or on a plain one."""

    directory: Path
    log: Path
    shape: tuple[str, ...]
    disk: PowerCutDisk | None = None
    starts_s: list[float] = field(default_factory=list)
    """From starting the process to its ready line."""

    def __post_init__(self) -> None:
        """Plan the process."""
        self._process = FabricProcess(self.directory, *self.shape, log=self.log, is_apart=True)

    @property
    def address(self) -> str:
        """Where its agent listens."""
        return f"unix://{self.directory}/agent-0.sock"

    def start(self) -> None:
        """Start it. Raises StartError when it does not come to its ready line."""
        begun_s = time.monotonic()
        self._process.launch()
        assert self._process.process is not None
        patience = threading.Timer(START_S, self._process.process.kill)
        patience.start()
        try:
            self._process.await_ready()
        except AssertionError as error:
            raise StartError(str(error)) from error
        finally:
            patience.cancel()
        self.starts_s.append(time.monotonic() - begun_s)

    def start_and_end(self, *, after_s: float) -> None:
        """Start it, and end it so soon that it may not be ready."""
        self._process.launch()
        time.sleep(after_s)
        self.end()

    def start_and_end_in_formatting(self, *, after_s: float) -> bool:
        """Start it in a new directory, and end it while it makes its drives; say whether it was not done."""
        self._process.launch()
        until_s = time.monotonic() + START_S
        shelf = self.directory / "enclosure-0"
        while not shelf.exists() and time.monotonic() < until_s:
            time.sleep(0.0005)
        time.sleep(after_s)
        is_half = sum(1 for _ in shelf.glob("*.img")) < _drives(self.shape)
        self.end()
        return is_half

    def end(self, *, cut_to_kill_s: float = 0.0) -> None:
        """End it as an outage does, and have the disk back.

        After a power cut the process lives *cut_to_kill_s* longer, in which it must not lie.
        """
        if self.disk is not None:
            self.disk.cut()
            time.sleep(cut_to_kill_s)
        self.kill()
        if self.disk is not None:
            self.disk.mount_again()

    def kill(self) -> None:
        """End it by SIGKILL alone; what the kernel has stays."""
        self._process.kill()

    def stop(self) -> int:
        """Stop it in order; return its exit code."""
        return self._process.stop()

    def died_of(self) -> int | None:
        """Return how it ended, when nobody ended it."""
        assert self._process.process is not None
        return self._process.process.poll()

    def crashes(self) -> list[str]:
        """Return the lines of its log that tell of a bug."""
        words = self.log.read_text().splitlines()
        return [line for line in words if "Traceback" in line or " bug" in line]

    def leave(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._process.process is not None and self._process.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def _drives(shape: tuple[str, ...]) -> int:
    return int(shape[shape.index("--drives") + 1])
