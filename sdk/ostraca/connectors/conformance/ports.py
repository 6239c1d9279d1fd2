"""Ports of the kit: the connector as an engine sees it, and the fabric with faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pages: TypeAlias = NDArray[np.uint8]
"""Pages of KV, shape (pages, bytes of a page)."""

RANDOM_SEED = "random"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine with the connector."""

    address: str
    """Address of the fabric's agent, possibly without an agent behind it."""

    layout: str = ""
    """Engines with different values arrange the bytes of a page differently, at equal sizes."""

    seed: str = "0"
    """PYTHONHASHSEED of the engine; ``RANDOM_SEED`` stands for another seed in each engine."""

    deadline_s: float = 5.0
    """Deadline of each lookup, load and store."""


class LoadedPages(NamedTuple):
    """Result of a load."""

    are_good: Sequence[bool]
    """Success by page; a page behind a failed page may fail, too."""

    memory: Pages
    """The engine's own memory of these pages, not a copy; left alone during the next 20 loads."""


class ConnectorUnderTest(Protocol):
    """Connector of one engine. Calls come one at a time, and wait for the result.

    A prompt's name and a position name a page. Engines give equal hashes to equal names, except for hash
    algorithms that depend on the seed.
    """

    page_bytes: int
    """Bytes of a page, at least 4,096."""

    block_bytes: int
    """Bytes of the page's first block; equal to ``page_bytes`` unless the connector cuts pages."""

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        """Store the first pages of a prompt; return the success by page."""

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        """Tell which of the first pages can be loaded; a page behind a missing page may be missing, too."""

    def load(self, prompt: str, count: int) -> LoadedPages:
        """Load the first pages of a prompt into the engine's memory."""

    def close(self) -> None:
        """End the engine."""


@dataclass(frozen=True, slots=True)
class Connector:
    """A connector to test."""

    name: str
    logger: str
    """Name of the connector's logger."""

    open: Callable[[EngineOptions], ConnectorUnderTest]
    """Start an engine with the connector. Never fails without a fabric."""


class FabricUnderTest(Protocol):
    """Fabric of one agent, with faults. Not started at first."""

    @property
    def address(self) -> str:
        """Address of the agent, also while no fabric runs."""

    def start(self) -> object:
        """Start, with all blocks of earlier runs."""

    def stop(self) -> None:
        """Stop in order: stored blocks reach flash."""

    def kill(self) -> None:
        """End the agent at once."""

    def freeze(self) -> None:
        """Stop the agent's threads; connections stay open."""

    def thaw(self) -> None:
        """Let the agent go on."""

    def hang_up(self) -> AbstractContextManager[list[float]]:
        """Hang up on every caller in place of a stopped agent; give the times of calls."""

    def overwrite(self, before: bytes, after: bytes) -> None:
        """Replace the bytes on flash that begin like *before*, while the fabric is stopped."""

    def explain(self, arguments: Sequence[str]) -> str:
        """Run ``ostraca explain`` with *arguments*; return the output."""
