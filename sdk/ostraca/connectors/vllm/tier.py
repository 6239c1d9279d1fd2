"""Tier: the secondary tier without any vLLM version.

The engine's scheduler calls the tier, one call at a time, and the tier never waits. Lookups, loads and
stores are submitted, and the results are taken at the next step. A failure of the fabric is a miss, or a
skipped store.

Each step of the engine: ``take_finished``, then any number of ``look_up``, ``load`` and ``store``, then
``end_step``, which sends the step's lookups as one. A load writes a row if and only if the load of that row
succeeds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostraca.connectors.vllm.core.lookup_table import ChunkState, LookupTable
from ostraca.connectors.vllm.core.prefix import GROUP_BYTES, Prefix, Run
from ostraca.connectors.vllm.core.transfers import TransferJob
from ostraca.connectors.vllm.fabric_link import FabricLink
from ostraca.connectors.vllm.operations import (
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    STORE_CHUNKS,
    TierCounters,
    TierMetric,
    TierOperations,
    TierSample,
)
from ostraca.connectors.vllm.settings import LOGGER, TierSettings
from ostraca.connectors.vllm.shape import EngineShape, hash_seed_problem
from ostraca_fabric.model.volume import Layout

log = logging.getLogger(LOGGER)

HASH_BYTES = 32
"""Length of vLLM's hashes, unless keys show another: SHA-256."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """Chunks to move between rows and the fabric, for one request of the engine."""

    job_id: int
    request: str
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    """The row of each key."""


class Tier:
    """Connection of one engine to the fabric.

    Not thread-safe, but calls may come from any thread.
    """

    def __init__(
        self,
        shape: EngineShape,
        settings: TierSettings,
        rows: NDArray[np.uint8],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the engine's host memory *rows*, shape (rows, bytes per row)."""
        self._settings = settings
        self._shape = shape
        self._rows: NDArray[np.uint8] | None = rows
        self._clock_s = clock_s
        self._hash_bytes = HASH_BYTES
        self._tokens_per_chunk = {group.number: group.tokens_per_chunk for group in shape.groups}
        self._prefixes: dict[str, Prefix] = {}
        self._lookups = LookupTable(
            entries_max=settings.table_chunks_max,
            failed_max=settings.failed_chunks_max,
            failed_hold_s=settings.failed_hold_s,
        )
        self._finished: list[TransferJob] = []
        self._link = FabricLink(settings, block_bytes=shape.row_bytes, layout=self._layout())
        self._operations = TierOperations(
            self._link,
            self._lookups,
            settings,
            row_bytes=shape.row_bytes,
            tokens_per_chunk=self._tokens_per_chunk,
            clock_s=clock_s,
        )

    @property
    def counters(self) -> TierCounters:
        """Counts so far."""
        return self._operations.counters

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk."""
        return self._shape.row_bytes

    @property
    def is_linked(self) -> bool:
        """Whether the fabric is connected and the volume open."""
        return self._link.volume() is not None

    @property
    def has_work(self) -> bool:
        """Whether jobs are under way, or over and not yet taken."""
        return bool(len(self._operations.transfers) or self._finished)

    def begin_request(self, request: str, positions: Mapping[bytes, int] | None) -> None:
        """Begin a request.

        *positions* is the engine's own record of the request's keys, or None.
        """
        self._prefixes[request] = Prefix(self._tokens_per_chunk, positions)

    def end_request(self, request: str) -> None:
        """End a request: no more calls name it.

        Transfers of the request may still be under way.
        """
        self._prefixes.pop(request, None)
        self._lookups.forget(request)

    def look_up(self, key: bytes, request: str) -> ChunkState:
        """Tell whether a chunk can be loaded: PRESENT, MISSING, or PENDING (look up again)."""
        now_s = self._clock_s()
        if len(key) - GROUP_BYTES != self._hash_bytes:
            self._adopt_hash_bytes(len(key) - GROUP_BYTES)
        refusal = self._operations.read_refusal
        if refusal:
            return self._missing(refusal)
        until_s = now_s + self._settings.lookup_deadline_s + self._settings.backoff_s
        state = self._lookups.state_of(request, key, now_s=now_s, until_s=until_s)
        return self._missing("table_full") if state is ChunkState.TABLE_FULL else state

    def load(self, job: TierJob) -> None:
        """Start to fill rows.

        ``take_finished`` returns the filled rows; the other rows are unchanged.
        """
        runs = self._begin(job, LOAD_CHUNKS, self._operations.read_refusal)
        self._operations.submit_loads(job.job_id, runs, self._rows_of(job))
        self._seal(job.job_id)

    def store(self, job: TierJob) -> None:
        """Start to copy rows to the fabric.

        The rows must not change until the job is finished.
        """
        runs = self._begin(job, STORE_CHUNKS, self._operations.write_refusal)
        self._operations.submit_stores(job.job_id, runs, self._rows_of(job))
        self._seal(job.job_id)

    def take_finished(self) -> list[TransferJob]:
        """Return the finished jobs, and pass new answers to lookups."""
        self._process(self._operations.poll())
        finished, self._finished = self._finished, []
        return finished

    def end_step(self) -> None:
        """Send the lookups of this step."""
        while self._operations.can_submit_lookup:
            pending = self._lookups.take_pending(self._settings.lookup_chunks_max)
            if not pending:
                return
            refusal = self._operations.read_refusal
            if refusal:
                self._answer_missing([key for _, keys in pending for key in keys], refusal)
            else:
                self._submit_lookups(pending)

    def drain(self) -> None:
        """Wait until no job is under way, at most until the deadlines.

        Afterwards nothing accesses the rows.
        """
        self._process(self._operations.drain())

    def samples(self) -> list[TierSample]:
        """Return the counts since the last call, and the current state."""
        return self._operations.samples()

    def close(self) -> None:
        """End the connection and release the rows. Takes seconds at most."""
        self._link.close()
        self._process(self._operations.poll())
        self._rows = None

    def _submit_lookups(self, pending: Iterable[tuple[str, list[bytes]]]) -> None:
        runs: list[Run] = []
        for request, keys in pending:
            found, strays = self._prefix(request).runs(keys)
            runs.extend(found)
            self._answer_missing(strays, "unplaced")
        if runs and not self._operations.submit_lookup(runs):
            self._answer_missing([key for run in runs for key in run.keys], "not_submitted")

    def _begin(self, job: TierJob, metric: TierMetric, refusal: str) -> list[Run]:
        """Begin a job; return the runs to send."""
        is_load = metric is LOAD_CHUNKS
        self._operations.transfers.begin(
            job.job_id, request=job.request, is_load=is_load, now_s=self._clock_s()
        )
        if refusal:
            self._operations.refuse(job.job_id, job.keys, metric, refusal)
            return []
        runs, strays = self._prefix(job.request).runs(job.keys)
        self._operations.refuse(job.job_id, strays, metric, "unplaced")
        return runs

    def _seal(self, job_id: int) -> None:
        finished = self._operations.transfers.seal(job_id, self._clock_s())
        if finished is not None:
            self._process([finished])

    def _process(self, finished: Iterable[TransferJob]) -> None:
        for job in finished:
            if job.is_load:
                self._lookups.record_failed_loads(job.request, job.failed)
            self._finished.append(job)

    def _missing(self, reason: str) -> ChunkState:
        self.counters.add(LOOKUP_CHUNKS, reason)
        return ChunkState.MISSING

    def _answer_missing(self, keys: Sequence[bytes], reason: str) -> None:
        self.counters.add(LOOKUP_CHUNKS, reason, len(keys))
        self._lookups.record_answers((key, False) for key in keys)

    def _prefix(self, request: str) -> Prefix:
        """Return the known prefix of a request, empty for an unknown request."""
        found = self._prefixes.get(request)
        return found or Prefix(self._tokens_per_chunk, {} if self._shape.has_positions else None)

    def _rows_of(self, job: TierJob) -> dict[bytes, NDArray[np.uint8]]:
        assert self._rows is not None, "the tier is closed"
        return {key: self._rows[row] for key, row in zip(job.keys, job.rows, strict=True)}

    def _adopt_hash_bytes(self, hash_bytes: int) -> None:
        """Move to the volume of another hash length, as shown by a key."""
        log.info("Ostraca tier: the engine's hashes have %d bytes", hash_bytes)
        why = hash_seed_problem("", hash_bytes, os.environ)
        if why:
            log.warning("Ostraca tier: %s", why)
        self._hash_bytes = hash_bytes
        self._link.switch_layout(self._layout())

    def _layout(self) -> Layout:
        return self._shape.layout(revision=self._settings.revision, hash_bytes=self._hash_bytes)
