"""ConformanceBench: steps that scenarios have in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ostraca.connectors.conformance.ports import (
    Connector,
    ConnectorUnderTest,
    EngineOptions,
    FabricUnderTest,
    Pages,
)

PROMPT = "the prompt"
PAGES = 4
SHORT_S = 0.5
CALL_S = 6.0
"""Longest call on a busy machine with a deadline of ``SHORT_S``, or without a fabric."""

_PATIENCE_S = 30.0
_POLL_S = 0.02
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ConformanceBench:
    """Connector and fabric of one scenario."""

    connector: Connector
    fabric: FabricUnderTest

    @contextmanager
    def engine(
        self, layout: str = "", *, seed: str = "0", deadline_s: float = 5.0
    ) -> Iterator[ConnectorUnderTest]:
        """Start an engine, and close it."""
        engine = self.connector.open(EngineOptions(self.fabric.address, layout, seed, deadline_s))
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def log(self) -> Iterator[list[str]]:
        """Collect the connector's log lines."""
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger(self.connector.logger)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield lines
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)


def content(engine: ConnectorUnderTest, seed: int = 0) -> Pages:
    """Return distinct random pages."""
    return np.random.default_rng(seed).integers(0, 256, (PAGES, engine.page_bytes), np.uint8)


def until(is_so: Callable[[], bool], trouble: str) -> None:
    """Wait for a condition. Raises AssertionError after a while."""
    until_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < until_s, trouble
        time.sleep(_POLL_S)


def timely(call: Callable[[], _Result]) -> _Result:
    """Return the result of a call that must not be stuck."""
    began_s = time.monotonic()
    result = call()
    took_s = time.monotonic() - began_s
    assert took_s < CALL_S, f"a request took {took_s:.1f} s"
    return result


def store(engine: ConnectorUnderTest, pages: Pages, prompt: str = PROMPT) -> None:
    """Store all pages, once the engine has found the fabric; return when the engine finds the pages."""
    until(lambda: all(engine.store(prompt, pages)), "pages are never stored")
    find(engine, len(pages), prompt)


def find(engine: ConnectorUnderTest, count: int = PAGES, prompt: str = PROMPT) -> None:
    """Wait until the engine finds pages."""
    until(lambda: all(engine.lookup(prompt, count)), "stored pages are never found")


def load(engine: ConnectorUnderTest, pages: Pages, prompt: str = PROMPT) -> Sequence[bool]:
    """Load pages; return the success by page. Bytes of successful pages must be right."""
    are_good, memory = timely(lambda: engine.load(prompt, len(pages)))
    for number, is_good in enumerate(are_good):
        assert not is_good or np.array_equal(memory[number], pages[number]), f"wrong bytes in page {number}"
    return are_good


def load_all(engine: ConnectorUnderTest, pages: Pages, prompt: str = PROMPT) -> None:
    """Load all pages, in one of several attempts."""
    until(lambda: all(load(engine, pages, prompt)), "stored pages are never loaded")


def miss(engine: ConnectorUnderTest, pages: Pages) -> None:
    """Look up and load pages that can't be there."""
    assert not any(timely(lambda: engine.lookup(PROMPT, len(pages)))), "a page is found, and can't be there"
    assert not any(load(engine, pages)), "a page is loaded, and can't be there"


def refuse(engine: ConnectorUnderTest, pages: Pages) -> None:
    """Store pages under a new name without an answer."""
    name = str(time.monotonic_ns())
    assert not any(timely(lambda: engine.store(name, pages))), "a page is stored nowhere"
