"""The tier, as any version of vLLM needs it.

It is called by the engine's scheduler, one call at a time, and never waits: questions, loads and stores are
submitted, and what has ended is taken at the next step. Whatever goes wrong with the fabric is a miss, or a
store that does not happen.

Each step of the engine: ``take_finished``, then ``look_up``, ``load`` and ``store`` as often as needed, then
``end_step``, which sends the step's questions as one. A load writes a row if and only if it succeeds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from ostraca.connectors.vllm.core.prefix import GROUP_BYTES, Prefix
from ostraca.connectors.vllm.core.transfers import Finished
from ostraca.connectors.vllm.core.verdicts import Verdict, Verdicts
from ostraca.connectors.vllm.counters import LOAD_CHUNKS, LOOKUP_CHUNKS, STORE_CHUNKS, Counters, Sample
from ostraca.connectors.vllm.link import Link
from ostraca.connectors.vllm.settings import LOGGER
from ostraca.connectors.vllm.traffic import Answer, Gone, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.connectors.vllm.core.prefix import Run
    from ostraca.connectors.vllm.counters import Metric
    from ostraca.connectors.vllm.settings import TierSettings
    from ostraca.connectors.vllm.shape import EngineShape
    from ostraca_fabric.layout import Layout

log = logging.getLogger(LOGGER)

HASH_BYTES = 32
"""Length of vLLM's hashes unless its keys show another: SHA-256."""


@dataclass(frozen=True, slots=True)
class Job:
    """Chunks to move between rows and the fabric, for one request of the engine."""

    job_id: int
    request: str
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    """The row of each key."""


class Tier:
    """One engine's way to the fabric. Not thread-safe; it does not care which thread calls."""

    def __init__(
        self,
        shape: EngineShape,
        settings: TierSettings,
        rows: NDArray[np.uint8],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """*rows* is the engine's host memory, shape (rows, bytes per row)."""
        self._settings = settings
        self._shape = shape
        self._rows: NDArray[np.uint8] | None = rows
        self._clock_s = clock_s
        self._hash_bytes = HASH_BYTES
        self._tokens_per_chunk = {group.number: group.tokens_per_chunk for group in shape.groups}
        self._prefixes: dict[str, Prefix] = {}
        self._verdicts = Verdicts(
            entries_max=settings.table_chunks_max,
            failed_max=settings.failed_chunks_max,
            failed_hold_s=settings.failed_hold_s,
        )
        self._finished: list[Finished] = []
        self._link = Link(settings, block_bytes=shape.row_bytes, layout=self._layout())
        self._traffic = Traffic(
            self._link,
            settings,
            row_bytes=shape.row_bytes,
            tokens_per_chunk=self._tokens_per_chunk,
            clock_s=clock_s,
        )

    @property
    def counters(self) -> Counters:
        """What has been counted so far."""
        return self._traffic.counters

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk."""
        return self._shape.row_bytes

    @property
    def is_linked(self) -> bool:
        """Whether a fabric was found and the volume is open."""
        return self._link.now() is not None

    @property
    def has_work(self) -> bool:
        """Whether jobs are under way, or over and not yet taken."""
        return bool(len(self._traffic.transfers) or self._finished)

    def begin_request(self, request: str, positions: Mapping[bytes, int] | None) -> None:
        """A request begins; *positions* is the engine's own record of its keys, if it keeps one."""
        self._prefixes[request] = Prefix(self._tokens_per_chunk, positions)

    def end_request(self, request: str) -> None:
        """No more calls name this request. Its transfers may still be under way."""
        self._prefixes.pop(request, None)
        self._verdicts.forget(request)

    def look_up(self, key: bytes, request: str) -> Verdict:
        """Tell whether a chunk could be loaded: THERE, MISSING, or ASKED for "ask again"."""
        now_s = self._clock_s()
        if len(key) - GROUP_BYTES != self._hash_bytes:
            self._learn_hash_bytes(len(key) - GROUP_BYTES)
        why_not = self._traffic.why_no_reads
        if why_not:
            return self._missing(why_not)
        until_s = now_s + self._settings.lookup_deadline_s + self._settings.pause_s
        verdict = self._verdicts.of(request, key, now_s=now_s, until_s=until_s)
        return self._missing("table_full") if verdict is Verdict.FULL else verdict

    def load(self, job: Job) -> None:
        """Begin to fill rows. ``take_finished`` tells which were filled; the others were not touched."""
        runs = self._begin(job, LOAD_CHUNKS, self._traffic.why_no_reads)
        self._traffic.load(job.job_id, runs, self._rows_of(job))
        self._seal(job.job_id)

    def store(self, job: Job) -> None:
        """Begin to copy rows to the fabric. They must not change until the job is finished."""
        runs = self._begin(job, STORE_CHUNKS, self._traffic.why_no_writes)
        self._traffic.store(job.job_id, runs, self._rows_of(job))
        self._seal(job.job_id)

    def take_finished(self) -> list[Finished]:
        """Return the jobs that are over, and let look-ups know what was answered meanwhile."""
        self._take_in(self._traffic.poll())
        finished, self._finished = self._finished, []
        return finished

    def end_step(self) -> None:
        """Send what this step has asked."""
        while self._traffic.has_room_to_ask:
            asked = self._verdicts.take_questions(self._settings.lookup_chunks_max)
            if not asked:
                return
            why_not = self._traffic.why_no_reads
            if why_not:
                self._answer_missing([key for _, keys in asked for key in keys], why_not)
            else:
                self._ask(asked)

    def drain(self) -> None:
        """Wait until no job is under way; deadlines bound it. Afterwards nothing touches the rows."""
        self._take_in(self._traffic.drain())

    def samples(self) -> list[Sample]:
        """Return what was counted since the last time, and how things stand."""
        return self._traffic.samples()

    def close(self) -> None:
        """End the connection and let go of the rows. Takes seconds at most."""
        self._link.close()
        self._take_in(self._traffic.poll())
        self._rows = None

    def _ask(self, asked: Iterable[tuple[str, list[bytes]]]) -> None:
        runs: list[Run] = []
        for request, keys in asked:
            found, strays = self._prefix(request).runs(keys)
            runs.extend(found)
            self._answer_missing(strays, "unplaced")
        if runs and not self._traffic.ask(runs):
            self._answer_missing([key for run in runs for key in run.keys], "not_submitted")

    def _begin(self, job: Job, metric: Metric, why_not: str) -> list[Run]:
        """Begin a job; return what of it is to be sent."""
        is_load = metric is LOAD_CHUNKS
        self._traffic.transfers.begin(job.job_id, request=job.request, is_load=is_load, now_s=self._clock_s())
        if why_not:
            self._traffic.refuse(job.job_id, job.keys, metric, why_not)
            return []
        runs, strays = self._prefix(job.request).runs(job.keys)
        self._traffic.refuse(job.job_id, strays, metric, "unplaced")
        return runs

    def _seal(self, job_id: int) -> None:
        finished = self._traffic.transfers.sealed(job_id, self._clock_s())
        if finished is not None:
            self._take_in([finished])

    def _take_in(self, ended: Iterable[Answer | Gone | Finished]) -> None:
        for each in ended:
            match each:
                case Answer(keys=keys, are_there=are_there):
                    self._verdicts.answered(zip(keys, are_there, strict=True))
                case Gone(keys=keys):
                    self._verdicts.hold(keys, self._clock_s())
                case Finished():
                    if each.is_load:
                        self._verdicts.failed(each.request, each.failed)
                    self._finished.append(each)
                case _:
                    assert_never(each)

    def _missing(self, why: str) -> Verdict:
        self.counters.add(LOOKUP_CHUNKS, why)
        return Verdict.MISSING

    def _answer_missing(self, keys: Sequence[bytes], why: str) -> None:
        self.counters.add(LOOKUP_CHUNKS, why, len(keys))
        self._verdicts.answered((key, False) for key in keys)

    def _prefix(self, request: str) -> Prefix:
        """Return what a request has shown; of one that never began, nothing is known."""
        found = self._prefixes.get(request)
        return found or Prefix(self._tokens_per_chunk, {} if self._shape.tells_positions else None)

    def _rows_of(self, job: Job) -> dict[bytes, NDArray[np.uint8]]:
        assert self._rows is not None, "the tier is closed"
        return {key: self._rows[row] for key, row in zip(job.keys, job.rows, strict=True)}

    def _learn_hash_bytes(self, hash_bytes: int) -> None:
        """The engine hashes otherwise than assumed: such blocks have a volume of their own."""
        log.info("Ostraca tier: the engine's hashes have %d bytes", hash_bytes)
        self._hash_bytes = hash_bytes
        self._link.want(self._layout())

    def _layout(self) -> Layout:
        return self._shape.layout(revision=self._settings.revision, hash_bytes=self._hash_bytes)
