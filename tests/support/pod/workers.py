"""Workers as processes of their own (``worker``), of this release or of another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from tests.fabric.membership.nodes import HERE, Place
from tests.support.pod.release_before import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

END_S = 30.0


class WorkerProcess:
    """One worker, which begins when it is made. Use it as a context manager."""

    def __init__(
        self,
        log: Path,
        *addresses: str,
        transport: str = "inline",
        place: Place = HERE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its release is that of the *environment*, or this one where that is None."""
        self.reasons: Counter[str] = Counter()
        """Why it missed what it missed."""

        self._log = log
        with log.open("a") as said:
            self._process = subprocess.Popen(
                [*place.before, sys.executable, "-m", "tests.support.pod.worker", transport, *addresses],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
            )

    def put(self, chains: Iterable[int], *, deadline_s: float = 5.0) -> list[int]:
        """Put chains; return those that are whole and committed."""
        done: list[int] = self._ask("put", chains, deadline_s)
        return done

    def not_found(self, chains: Iterable[int], *, deadline_s: float = 2.0) -> list[int]:
        """Look chains up; return those that are not there whole."""
        gone: list[int] = self._ask("look up", chains, deadline_s)
        return gone

    def missing(self, chains: Iterable[int], *, deadline_s: float = 2.0) -> list[int]:
        """Get chains; return those that are not whole. A wrong byte fails the test."""
        gone: list[int]
        gone, reasons = self._ask("get", chains, deadline_s)
        self.reasons.update(reasons)
        return gone

    def _ask(self, verb: str, chains: Iterable[int], deadline_s: float) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([verb, list(chains), deadline_s]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        if kind is None:
            assert self._process.returncode == 0, self._log.read_text()[-3000:]
