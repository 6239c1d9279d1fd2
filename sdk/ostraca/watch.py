"""Watch: news of blocks, for programs that announce to others what the fabric has.

The fabric announces no evictions. So announced blocks are looked up in turn, and the missing ones withdrawn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, Protocol

from ostraca.volume import Volume
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.policies.rounds import Rounds
from ostraca_fabric.runtime.threads import BackgroundTask

_DUE_BLOCKS = 512


class NamedBlocks(Protocol):
    """Blocks of a chain, with the caller's names in order."""

    @property
    def chain(self) -> Chain:
        """The blocks."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The name of each block."""


class BlockAnnouncement(NamedTuple):
    """News of blocks: stored, or found missing."""

    keys: tuple[bytes, ...]
    is_removed: bool


class BlockNews:
    """Unsent news, and the announced blocks, bounded: the oldest are withdrawn. Thread-safe."""

    def __init__(self, rounds: Rounds[NamedBlocks], *, announced_max: int) -> None:
        """Begin without news; *rounds* decides when announced blocks are looked up."""
        self._rounds = rounds
        self._announced_max = announced_max
        self._changing = threading.Lock()
        self._announced: dict[bytes, NamedBlocks] = {}
        self.unsent: list[BlockAnnouncement] = []

    def __len__(self) -> int:
        """Count the announced blocks."""
        return len(self._announced)

    def announce(self, run: NamedBlocks, stored: Container[bytes]) -> None:
        """Announce the *stored* blocks of a run."""
        keys = tuple(key for key in run.keys if key in stored)
        if not keys:
            return
        with self._changing:
            self.unsent.append(BlockAnnouncement(keys, is_removed=False))
            self._rounds.add(run)
            for key in keys:
                self._announced.pop(key, None)
                self._announced[key] = run
            excess = max(0, len(self._announced) - self._announced_max)
            self._withdraw(list(islice(self._announced, excess)))

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Withdraw those of the missing blocks that stand announced."""
        with self._changing:
            self._withdraw([key for key in keys if key in self._announced])

    def take(self) -> list[BlockAnnouncement]:
        """Return the news since the last call, in order."""
        with self._changing:
            unsent, self.unsent = self.unsent, []
        return unsent

    def take_due(self) -> tuple[list[NamedBlocks], float]:
        """Return the announced runs to look up next, and the pause before."""
        with self._changing:
            return self._rounds.take_due(
                lambda run: sum(self._announced.get(key) is run for key in run.keys),
                most=_DUE_BLOCKS,
                total=len(self._announced),
            )

    def drop(self, run: NamedBlocks, keys: Sequence[bytes]) -> None:
        """Withdraw missing blocks of a run, unless announced again since."""
        with self._changing:
            self._withdraw([key for key in keys if self._announced.get(key) is run])

    def _withdraw(self, keys: Sequence[bytes]) -> None:
        if keys:
            self.unsent.append(BlockAnnouncement(tuple(keys), is_removed=True))
        for key in keys:
            del self._announced[key]


class BlockWatch:
    """Lookups of announced blocks, in a thread. Call ``start`` after announcements; ``close`` must be called.

    The lookups are not counted as reads. A block is withdrawn only if its shard's owner says that there is no
    such block: a fabric without answers loses none.
    """

    def __init__(self, news: BlockNews, volume: Callable[[], Volume | None], *, deadline_s: float) -> None:
        """Watch the *volume* that can be asked now, if any. *deadline_s* limits each lookup."""
        self._news = news
        self._volume = volume
        self._deadline_s = deadline_s
        self._due: Sequence[NamedBlocks] = ()
        self._task = BackgroundTask(
            "watch", self._look_up, is_needed=lambda: len(news) > 0, pauses_s=self._pauses_s
        )

    def start(self) -> None:
        """Start the thread if there is something to watch. Never blocks."""
        self._task.start()

    def close(self) -> None:
        """End the thread soon. Does not wait."""
        self._task.close()

    def _pauses_s(self) -> Iterator[float]:
        while True:
            self._due, pause_s = self._news.take_due()
            yield pause_s

    def _look_up(self) -> None:
        volume, due = self._volume(), self._due
        if volume is None or not due:
            return
        with suppress(OstracaError):  # as of a closed client
            chains = [run.chain for run in due]
            found = volume.lookup(chains, deadline_s=self._deadline_s, is_counted=False)
            for run, outcomes in zip(due, found.chains, strict=True):
                whys = zip(run.keys, outcomes.reason_codes, strict=True)
                self._news.drop(run, [key for key, why in whys if why == Reason.NOT_FOUND])
