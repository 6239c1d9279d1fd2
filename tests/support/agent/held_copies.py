"""Copies out of a worker's memory that wait for a test."""

from __future__ import annotations

import threading

import pytest

from ostraca_fabric.tables.digests import TAG_BYTES, ProcessBlocks, TagCheck


class HeldCopies:
    """Holds copies right before their first block, as a worker's slow memory would.

    Copies of blocks with one of the tags *passing* are not held.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, passing: bytes = b"") -> None:
        self.parts: list[slice] = []
        """Rows of all copies begun and held."""

        self._go = threading.Event()
        tags = {passing[at : at + TAG_BYTES] for at in range(0, len(passing), TAG_BYTES)}
        receive = TagCheck.receive

        def receiving(check: TagCheck, rows: slice, source: ProcessBlocks | None = None) -> None:
            if check.tags[rows.start].tobytes() not in tags:
                self.parts.append(rows)
                assert self._go.wait(30)
            receive(check, rows, source)

        monkeypatch.setattr(TagCheck, "receive", receiving)

    def let_go(self) -> None:
        self._go.set()
