"""Copies out of a worker's memory that wait for a test."""

from __future__ import annotations

import threading

import pytest

from ostraca_fabric.tables.digests import ProcessBlocks, TagCheck


class HeldCopies:
    """Holds copies right before their first block, as a worker's slow memory would.

    The first *passing* copies are not held.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, passing: int = 0) -> None:
        self.parts: list[slice] = []
        """Rows of all copies begun and held."""

        self._passing = threading.Semaphore(passing)
        self._go = threading.Event()
        receive = TagCheck.receive

        def receiving(check: TagCheck, rows: slice, source: ProcessBlocks | None = None) -> None:
            if not self._passing.acquire(blocking=False):
                self.parts.append(rows)
                assert self._go.wait(30)
            receive(check, rows, source)

        monkeypatch.setattr(TagCheck, "receive", receiving)

    def let_go(self) -> None:
        self._go.set()
