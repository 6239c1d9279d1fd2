"""Tier: the secondary tier without any vLLM version.

The engine's scheduler calls the tier, one call at a time, and the tier never waits. Lookups, loads and
stores are submitted, and the results are taken at the next step. A failure of the fabric is a miss, or a
skipped store.

Each step of the engine: ``take_finished``, then any number of ``look_up``, ``load`` and ``store``, then
``end_step``, which sends the step's lookups as one. A failed load leaves undefined bytes in its row: vLLM
frees the row without a read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ostraca.connectors.kv_identity.chains import Run
from ostraca.connectors.kv_identity.identity import KvIdentity
from ostraca.connectors.transfers.counters import LOOKUP_CHUNKS, ConnectorCounters, MetricSample
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.jobs import RowJob, TransferJob
from ostraca.connectors.transfers.operations import Ended, FabricOperations
from ostraca.connectors.transfers.rows import PoolRows
from ostraca.connectors.vllm.core.hints import RequestHints
from ostraca.connectors.vllm.core.lookup_table import ChunkState, LookupTable
from ostraca.connectors.vllm.core.prefix import GROUP_BYTES, Prefix
from ostraca.connectors.vllm.settings import LOGGER, TierSettings
from ostraca.connectors.vllm.shape import check_chunk_bytes, common_seed, hash_seed_problem
from ostraca.watch import BlockAnnouncement, BlockNews, BlockWatch, NamedBlocks
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.policies.rounds import Rounds

log = logging.getLogger(LOGGER)


def read_settings(config: Mapping[str, object], *, publishes_events: bool) -> TierSettings | None:
    """Read the tier's entry in vLLM's configuration; None after logging its problem."""
    try:
        settings = TierSettings.of(config)
    except UsageError as error:
        _log_problem(error)
        return None
    if settings.enable_kv_events and not publishes_events:
        log.warning("Ostraca: enable_kv_events has no effect without vLLM's --kv-events-config")
        return replace(settings, enable_kv_events=False)
    return settings


def _log_problem(problem: UsageError) -> None:
    """Log why the engine serves without the tier: vLLM would exit on an error."""
    log.error("Ostraca: the engine serves without the tier: %s", problem)


_SETTLE_S = 1.0
"""Time for which an engine without requests keeps stepping after a job, to publish evictions."""

HASH_BYTES = 32
"""Length of vLLM's hashes until keys show the true one: SHA-256."""


class Tier:
    """Connection of one engine to the fabric.

    Not thread-safe, but calls may come from any thread.
    """

    def __init__(
        self,
        identity: KvIdentity,
        settings: TierSettings | None,
        rows: NDArray[np.uint8],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the engine's host memory *rows*, shape (rows, bytes per row), in use until ``close``.

        Without settings, every chunk is a miss: the configuration has a logged problem.
        """
        self._is_on = settings is not None and self._fits(identity)
        self._settings = settings = settings or TierSettings()
        self._weights = self._read_weights() if self._is_on else None
        """Fingerprint of the weights; None while unknown."""
        self._identity = replace(identity, weights=self._weights or "")
        self._shown_hash_bytes = 0
        """Length of the hashes of keys; 0 before the first key."""
        self._clock_s = clock_s
        self._tokens_per_chunk = {group.number: group.block_tokens for group in identity.groups}
        self._prefixes: dict[str, Prefix] = {}
        self._hints: dict[str, RequestHints] = {}
        self._to_prefetch: set[str] = set()
        """Requests with unsent prefetches: vLLM tells a request's keys some steps after the request."""
        rounds = Rounds[NamedBlocks](round_s=settings.recheck_s, rate_per_s=settings.recheck_chunks_per_s)
        self._news = BlockNews(rounds, announced_max=settings.table_chunks_max)
        self._link = FabricLink(settings, block_bytes=identity.block_bytes, layout=self._layout())
        pool = PoolRows(rows)
        self._link.register(pool)
        self._operations = FabricOperations(
            self._link, settings, pool, tokens_per_chunk=self._tokens_per_chunk, clock_s=clock_s
        )
        self._watch = BlockWatch(
            self._news,
            lambda: None if self._operations.health.read_refusal else self._link.volume(),
            deadline_s=settings.lookup_deadline_s,
        )
        self._stores: dict[int, list[Run]] = {}
        """Runs of the stores under way, if announced."""
        self._steps_until_s = 0.0
        self._lookups = LookupTable(self._operations.failed_loads, entries_max=settings.table_chunks_max)

    @property
    def counters(self) -> ConnectorCounters:
        """Counts so far."""
        return self._operations.counters

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk."""
        return self._identity.block_bytes

    @property
    def is_linked(self) -> bool:
        """Whether the fabric is connected and the volume open."""
        return self._link.volume() is not None

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping: to end jobs, and to publish news."""
        may_lose = len(self._news) > 0 and self._clock_s() < self._steps_until_s
        return self._operations.has_work or may_lose or bool(self._news.unsent)

    def begin_request(
        self, request: str, positions: Mapping[bytes, int] | None, hints: RequestHints | None = None
    ) -> None:
        """Begin a request.

        *positions* is the engine's own record of the request's keys, or None.
        """
        self._prefixes[request] = Prefix(self._tokens_per_chunk, positions)
        if hints is not None:
            self._hints[request] = hints
            if hints.has_prefetch:
                self._to_prefetch.add(request)

    def end_request(self, request: str) -> None:
        """End a request: no more calls name it.

        Transfers of the request may still be under way.
        """
        prefix = self._prefixes.pop(request, None)
        self._lookups.forget(request)
        self._to_prefetch.discard(request)
        hints = self._hints.pop(request, None)
        if prefix is not None and hints is not None and hints.is_session_end:
            self._operations.end_session(prefix.whole())

    def look_up(self, key: bytes, request: str) -> ChunkState:
        """Tell whether a chunk can be loaded: PRESENT, MISSING, or PENDING (look up again)."""
        now_s = self._clock_s()
        if len(key) - GROUP_BYTES != self._shown_hash_bytes:
            self._adopt_hash_bytes(len(key) - GROUP_BYTES)
        refusal = self._operations.health.read_refusal
        if refusal:
            return self._missing(refusal)
        until_s = now_s + self._settings.lookup_deadline_s + self._settings.backoff_s
        state = self._lookups.state_of(request, key, now_s=now_s, until_s=until_s)
        return self._missing("table_full") if state is ChunkState.TABLE_FULL else state

    def load(self, job: RowJob) -> None:
        """Start to fill rows.

        ``take_finished`` returns the filled rows; the other rows of the job have undefined bytes.
        """
        self._operations.load(job, *self._prefix(job.request).runs(job.keys))

    def store(self, job: RowJob) -> None:
        """Start to copy rows to the fabric.

        The rows must not change until the job is finished.
        """
        hints = self._hints.get(job.request)
        runs, strays = self._prefix(job.request).runs(job.keys)
        if self._settings.enable_kv_events:
            self._stores[job.job_id] = runs
        self._operations.store(job, runs, strays, ttl_s=hints.ttl_s if hints else None)

    def take_finished(self) -> list[TransferJob]:
        """Return the finished jobs, and pass new answers to lookups."""
        return self._process(self._operations.poll())

    def take_events(self) -> list[BlockAnnouncement]:
        """Return the news since the last call; empty unless ``enable_kv_events``."""
        return self._news.take()

    def end_step(self) -> None:
        """Send the prefetches and lookups of this step."""
        for request in sorted(self._to_prefetch):
            runs = self._prefix(request).whole()
            if runs:
                self._operations.prefetch(runs)
                self._to_prefetch.discard(request)
        while self._operations.can_submit_lookup:
            pending = self._lookups.take_pending(self._settings.lookup_chunks_max)
            if not pending:
                return
            refusal = self._operations.health.read_refusal
            if refusal:
                self._answer_missing([key for _, keys in pending for key in keys], refusal)
            else:
                self._submit_lookups(pending)

    def drain(self) -> None:
        """Wait until no job is under way, at most until the deadlines.

        Afterwards nothing accesses the rows, and ``take_finished`` returns the finished jobs. vLLM calls this
        on a reset, as after an update of the weights: new weights begin another volume.
        """
        self._operations.drain()
        if self._is_on:
            self._adopt_weights()

    def samples(self) -> list[MetricSample]:
        """Return the counts since the last call, and the current state."""
        return self._operations.samples()

    def close(self) -> None:
        """End stores under way within ``close_deadline_s``, then the connection, and release the rows."""
        self._watch.close()
        self._operations.close()

    def _submit_lookups(self, pending: Iterable[tuple[str, list[bytes]]]) -> None:
        runs: list[Run] = []
        for request, keys in pending:
            found, strays = self._prefix(request).runs(keys)
            runs.extend(found)
            self._answer_missing(strays, "unplaced")
        if runs and not self._operations.submit_lookup(runs):
            self._answer_missing([key for run in runs for key in run.keys], "not_submitted")

    def _process(self, ended: Ended) -> list[TransferJob]:
        self._lookups.record_answers(ended.answers)
        if self._settings.enable_kv_events:
            self._report(ended)
        for job in ended.jobs:
            if job.is_load:
                self._lookups.record_failed_loads(job.request, job.failed)
        return ended.jobs

    def _report(self, ended: Ended) -> None:
        self._news.withdraw(ended.lost)
        for job in ended.jobs:
            self._steps_until_s = self._clock_s() + _SETTLE_S
            for run in self._stores.pop(job.job_id, ()):
                self._news.announce(run, frozenset(job.succeeded))
        self._watch.start()

    def _missing(self, reason: str) -> ChunkState:
        self.counters.add(LOOKUP_CHUNKS, reason)
        return ChunkState.MISSING

    def _answer_missing(self, keys: Sequence[bytes], reason: str) -> None:
        self.counters.add(LOOKUP_CHUNKS, reason, len(keys))
        self._lookups.record_answers((key, False) for key in keys)

    def _prefix(self, request: str) -> Prefix:
        """Return the known prefix of a request, empty for an unknown request."""
        found = self._prefixes.get(request)
        return found or Prefix(self._tokens_per_chunk, {} if self._identity.is_chained else None)

    def _fits(self, identity: KvIdentity) -> bool:
        try:
            check_chunk_bytes(identity.block_bytes)
        except UsageError as error:
            _log_problem(error)
            return False
        return True

    def _read_weights(self) -> str | None:
        try:
            return self._settings.weights()
        except UsageError as error:
            _log_problem(error)
            return None

    def _adopt_weights(self) -> None:
        """Move to the volume of the present weights; leave all volumes while the weights are unknown."""
        weights = self._read_weights()
        if weights != self._weights:
            self._weights = weights
            self._identity = replace(self._identity, weights=weights or "")
            self._switch_layout()

    def _adopt_hash_bytes(self, hash_bytes: int) -> None:
        """Use the volume of this hash length, as shown by a key, and compare the hash seed there.

        Before the first key, the volume may be that of another hash algorithm, with other seeds.
        """
        self._shown_hash_bytes = hash_bytes
        if hash_bytes == self._identity.hash_bytes:
            self._link.compare_hash_seed(self._hash_seed())
            return
        log.info("Ostraca: the engine's hashes have %d bytes", hash_bytes)
        why = hash_seed_problem("", hash_bytes, os.environ)
        if why:
            log.warning("Ostraca: %s", why)
        self._identity = replace(self._identity, hash_bytes=hash_bytes)
        self._switch_layout()

    def _switch_layout(self) -> None:
        self._link.switch_layout(self._layout(), hash_seed=self._hash_seed())

    def _hash_seed(self) -> str:
        """Return the seed that other engines must share; empty before the first key."""
        return common_seed(self._shown_hash_bytes, os.environ) if self._shown_hash_bytes else ""

    def _layout(self) -> Layout | None:
        """Return the layout of the volume to use, None while no volume is to be used."""
        return None if self._weights is None else self._identity.layout()
