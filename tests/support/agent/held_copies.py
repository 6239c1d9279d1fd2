"""Copies out of a worker's memory that wait for a test."""

from __future__ import annotations

import threading

import pytest

from ostraca_dpu_agent.adapters.transports.worker_memory import MemoryFetch
from ostraca_fabric.tables.digests import TAG_BYTES


class HeldCopies:
    """Holds copies right before their first block, as a worker's slow memory would.

    Copies of blocks with one of the tags *passing* are not held.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, passing: bytes = b"") -> None:
        self.parts: list[slice] = []
        """Rows of all copies begun and held."""

        self._go = threading.Event()
        tags = {passing[at : at + TAG_BYTES] for at in range(0, len(passing), TAG_BYTES)}
        copy = MemoryFetch._copy

        def copying(fetch: MemoryFetch, rows: slice) -> None:
            if fetch._check.tags[rows.start].tobytes() not in tags:
                self.parts.append(rows)
                assert self._go.wait(30)
            copy(fetch, rows)

        monkeypatch.setattr(MemoryFetch, "_copy", copying)

    def let_go(self) -> None:
        self._go.set()
