"""Processes of the demo: a fabric and its workers, as context managers without leftovers.

Each stderr goes to a log file, and errors show the end of the log.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from demo.messages import AnyOrder, AnyReport, Failed, Ready, Report, Task

STOP_S = 20.0
"""Longest time of a graceful stop, before a kill."""

REPOSITORY = Path(__file__).resolve().parent.parent
_LOG_LINES = 30
_Report = TypeVar("_Report", bound=Report)


class ProcessFailedError(Exception):
    """Failure of a process of the demo, with its last output in the message."""

    def __init__(self, name: str, why: str, log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
        super().__init__("\n".join([f"{name} {why}; the last lines of its log:", *lines]))


class _Process:
    """Process with a log, in its own group, so that Ctrl-C in the terminal reaches the demo alone."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        # Waiting threads must not spin: they would take the cores from the process that everybody waits for.
        # And what libraries leave among the temporary files shall go when the demo does.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(log.parent)}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                cwd=REPOSITORY,
                process_group=0,
            )

    def failed(self, why: str) -> ProcessFailedError:
        """Return the error to raise."""
        return ProcessFailedError(self.name, why, self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the process, unless stopped before."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self.failed(f"ended with exit code {self._process.wait(STOP_S)}")
        return line

    def _wait(self) -> None:
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise self.failed(f"did not stop within {STOP_S:.0f} s") from error
        if code:
            raise self.failed(f"ended with exit code {code}")


class FabricProcess(_Process):
    """`ostraca up` in another process: two enclosures with two drives, without a DRAM cache.

    Without the cache, every load comes from flash. The demo destroys the content of sound drives, so the
    fabric must not count the damage as drive failures: by default, a fabric stops puts to a drive with
    repeated damage.
    """

    ENCLOSURES = 2
    DRIVES = 2
    FAULTS = 1_000_000
    """More faults than the demo can cause."""

    def __init__(self, directory: Path, *, drive_bytes: int) -> None:
        self.directory = directory
        options = {
            "--dir": str(directory),
            "--enclosures": str(self.ENCLOSURES),
            "--drives": str(self.DRIVES),
            "--capacity": str(self.ENCLOSURES * self.DRIVES * drive_bytes),
            "--dram": "0",
        }
        trust = [f"--set=health.{limit}={self.FAULTS}" for limit in ("suspect_faults", "failed_faults")]
        command = ["ostraca_cli", "up", *(word for option in options.items() for word in option), *trust]
        super().__init__("The fabric", command, directory.with_name(f"{directory.name}.log"))

    def wait_until_ready(self) -> str:
        """Return the fabric's address."""
        line = self._read_line().decode()
        found = re.search(r"unix://[^\"']+", line)
        if found is None:
            raise self.failed(f"said {line!r} instead of how to connect")
        return found.group()

    def stop(self) -> None:
        """Stop the fabric gracefully, as Ctrl-C does. Raises ProcessFailedError on failure."""
        self._process.send_signal(signal.SIGINT)
        self._wait()


class WorkerProcess(_Process):
    """Fresh worker, with an empty cache."""

    def __init__(self, name: str, task: Task, log: Path) -> None:
        super().__init__(name, ["demo.worker", msgspec.json.encode(task).decode()], log)

    def wait_until_ready(self) -> Ready:
        """Return the worker's description of itself."""
        return self._report(Ready)

    def execute(self, order: AnyOrder, expected: type[_Report]) -> _Report:
        """Send an order; return the report. Raises ProcessFailedError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failed("is gone") from error
        return self._report(expected)

    def stop(self) -> None:
        """End the worker. Raises ProcessFailedError for exit codes other than 0."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._wait()

    def _report(self, expected: type[_Report]) -> _Report:
        report: Report = msgspec.json.decode(self._read_line(), type=AnyReport)
        if isinstance(report, Failed):
            raise self.failed(f"failed ({report.why})")
        assert isinstance(report, expected), f"{report!r} is no answer to what {self.name} was asked"
        return report
