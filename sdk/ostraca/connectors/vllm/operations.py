"""Operations of the tier that are under way with the fabric, and their counters.

The class submits operations, converts ended operations into answers or finished jobs, decides on backoff,
and counts, under names among vLLM's metrics. Only ``drain`` waits.
"""

from __future__ import annotations

import logging
import select
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ostraca.connectors.vllm.core.lookup_table import LookupTable
from ostraca.connectors.vllm.core.prefix import Run
from ostraca.connectors.vllm.core.transfers import RequestBackoff, TransferJob, Transfers
from ostraca.connectors.vllm.fabric_link import FabricLink
from ostraca.connectors.vllm.settings import LOGGER, TierSettings
from ostraca.results import BlockOutcomes, GetResult, LookupResult, PutResult
from ostraca.volume import Volume
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import BlockState, PutState, Reason

_PREFIX = "vllm:kv_offload_ostraca_"
_KNOWN_REASONS = frozenset(Reason)


@dataclass(frozen=True, slots=True, eq=False)
class TierMetric:
    """Metric with identity by object. Prometheus adds ``_total`` to a counter's name."""

    name: str
    kind: str
    """``counter`` or ``gauge``."""
    help: str
    label: str = ""
    """The only label besides vLLM's own; empty for none."""


LOOKUP_CHUNKS = TierMetric(f"{_PREFIX}lookup_chunks", "counter", "Chunks looked up, by outcome.", "outcome")
LOAD_CHUNKS = TierMetric(f"{_PREFIX}load_chunks", "counter", "Chunks to load, by outcome.", "outcome")
STORE_CHUNKS = TierMetric(f"{_PREFIX}store_chunks", "counter", "Chunks to store, by outcome.", "outcome")
LOAD_BYTES = TierMetric(f"{_PREFIX}load_bytes", "counter", "Bytes loaded and verified.")
REQUESTS = TierMetric(f"{_PREFIX}requests", "counter", "Requests to the fabric, by operation.", "operation")
INFLIGHT_CHUNKS = TierMetric(
    f"{_PREFIX}inflight_chunks", "gauge", "Chunks of loads and stores under way.", "operation"
)
IS_USABLE = TierMetric(f"{_PREFIX}is_usable", "gauge", "1 while the fabric is connected and answers, else 0.")

METRICS = (
    LOOKUP_CHUNKS,
    LOAD_CHUNKS,
    STORE_CHUNKS,
    LOAD_BYTES,
    REQUESTS,
    INFLIGHT_CHUNKS,
    IS_USABLE,
)


class TierSample(NamedTuple):
    """Value of a metric; for a counter, the increase since the last call."""

    metric: TierMetric
    label: str
    value: float


class TierCounters:
    """Counts since the tier began, and since the last ``take``."""

    def __init__(self) -> None:
        self.total: Counter[tuple[TierMetric, str]] = Counter()
        self._new: Counter[tuple[TierMetric, str]] = Counter()

    def add(self, metric: TierMetric, label: str = "", count: int = 1) -> None:
        """Add to a metric."""
        if count:
            self.total[metric, label] += count
            self._new[metric, label] += count

    def take(self) -> Iterable[TierSample]:
        """Return the increases since the last call."""
        new, self._new = self._new, Counter()
        return [TierSample(metric, label, value) for (metric, label), value in new.items()]


def outcome_name(state: BlockState | PutState, reason: int) -> str:
    """Return the name of a block's outcome: its reason if any, else its state."""
    if not reason:
        return state.name.lower()
    return Reason(reason).name.lower() if reason in _KNOWN_REASONS else "other"


Rows = Mapping[bytes, NDArray[np.uint8]]
"""The row of each key of a job."""

log = logging.getLogger(LOGGER)

_LATE = frozenset({Reason.DEADLINE})
"""A request with only this reason had no answer in time."""

_READS_FAIL = _LATE | {Reason.DISCONNECTED}
"""A read with only these reasons, and not only late blocks, reached no agent."""

_WRITES_FAIL = _READS_FAIL | {
    Reason.OVERLOADED,
    Reason.NO_SPACE,
    Reason.BUSY,
    Reason.INDEX_FULL,
    Reason.NO_OWNER,
    Reason.FENCED,
    Reason.SWITCHED_OFF,
    Reason.QUARANTINED,
    Reason.STALE_VOLUME,
    Reason.QUOTA,
}
"""A store with only these reasons, and not only late blocks, would fail again."""

_ACCEPTED = frozenset({PutState.STAGED, PutState.COMMITTED, PutState.EXISTS})

_DRAIN_GRACE_S = 1.0
"""Extra wait of ``drain`` beyond the longest deadline, before an error is logged."""


class TierOperations:
    """Lookups, loads and stores under way."""

    def __init__(
        self,
        link: FabricLink,
        lookups: LookupTable,
        settings: TierSettings,
        *,
        row_bytes: int,
        tokens_per_chunk: Mapping[int, int],
        clock_s: Callable[[], float],
    ) -> None:
        self.counters = TierCounters()
        self.transfers = Transfers()
        self._link = link
        self._lookups = lookups
        self._settings = settings
        self._row_bytes = row_bytes
        self._tokens_per_chunk = tokens_per_chunk
        self._clock_s = clock_s
        self._pending_lookups: dict[Hashable, tuple[bytes, ...]] = {}
        """Submitted lookups: the chunks of each, chain after chain."""
        self._reads = settings.backoff()
        self._writes = settings.backoff()

    @property
    def read_refusal(self) -> str:
        """Reason against lookups and loads now; empty if allowed."""
        return self._refusal(self._reads)

    @property
    def write_refusal(self) -> str:
        """Reason against stores now; empty if allowed."""
        return self._refusal(self._writes)

    @property
    def can_submit_lookup(self) -> bool:
        """Whether another lookup may be sent."""
        return len(self._pending_lookups) < self._settings.lookups_inflight_max

    # Sending.

    def submit_lookup(self, runs: Sequence[Run]) -> bool:
        """Send one lookup; ``poll`` passes the answer to the table. False if not sent."""
        ticket = self._submit(
            "lookup",
            lambda volume: volume.submit_lookup(
                [run.chain for run in runs],
                pin_s=self._settings.pin_s,
                deadline_s=self._settings.lookup_deadline_s,
            ),
        )
        if ticket is None:
            return False
        self._pending_lookups[ticket] = tuple(key for run in runs for key in run.keys)
        return True

    def submit_loads(self, job_id: int, runs: Sequence[Run], rows: Rows) -> None:
        """Send a begun job's loads, within the limit."""
        for run in runs:
            if self.transfers.loading + len(run.keys) > self._settings.loads_inflight_chunks_max:
                self.refuse(job_id, run.keys, LOAD_CHUNKS, "too_many")
                continue
            ticket = self._submit(
                "load",
                lambda volume, run=run: volume.submit_get(  # type: ignore[misc]  # a default argument
                    run.chain,
                    into=[rows[key] for key in run.keys],
                    deadline_s=self._settings.load_deadline_s,
                    recompute_s=self._recompute_s(run),
                ),
            )
            self._begin_transfer(job_id, ticket, run.chain, run.keys, LOAD_CHUNKS)

    def submit_stores(self, job_id: int, runs: Sequence[Run], rows: Rows) -> None:
        """Send a begun job's stores, within the limit."""
        for run in runs:
            room = max(0, self._settings.stores_inflight_chunks_max - self.transfers.storing)
            # A prefix is worth more than later chunks, so drop the end.
            kept = run.keys[:room]
            self.refuse(job_id, run.keys[room:], STORE_CHUNKS, "too_many")
            if not kept:
                continue
            chain = run.chain[: len(kept)]
            ticket = self._submit(
                "store",
                lambda volume, chain=chain, kept=kept: volume.submit_put(  # type: ignore[misc]  # default arguments
                    chain,
                    source=[rows[key] for key in kept],
                    deadline_s=self._settings.store_deadline_s,
                ),
            )
            self._begin_transfer(job_id, ticket, chain, kept, STORE_CHUNKS)

    def refuse(self, job_id: int, keys: Sequence[bytes], metric: TierMetric, reason: str) -> None:
        """Mark these chunks of a begun job as failed without an attempt."""
        self.transfers.refuse(job_id, keys)
        self.counters.add(metric, reason, len(keys))

    def _submit(self, operation: str, submit: Callable[[Volume], Hashable]) -> Hashable | None:
        """Submit to the open volume; return the ticket, or None if not sent."""
        volume = self._link.volume()
        if volume is None:
            return None
        try:
            ticket = submit(volume)
        except OstracaError as error:
            log.warning("Ostraca tier: a %s could not be submitted: %s", operation, error)
            return None
        self.counters.add(REQUESTS, operation)
        return ticket

    def _begin_transfer(
        self, job_id: int, ticket: Hashable, chain: Chain, keys: tuple[bytes, ...], metric: TierMetric
    ) -> None:
        if ticket is None:
            self.refuse(job_id, keys, metric, "not_submitted")
            return
        self.transfers.add(job_id, ticket, keys)
        if log.isEnabledFor(logging.DEBUG) and (volume := self._link.volume()) is not None:
            _log_explain_command(volume, chain)

    # Ended operations.

    def poll(self) -> list[TransferJob]:
        """Pass the results of ended operations to the table; return the finished jobs."""
        client = self._link.client
        finished: list[TransferJob] = []
        for done in client.take_completions() if client else ():
            if done.error is not None:
                log.warning("Ostraca tier: a request ended with an error: %s", done.error)
            keys = self._pending_lookups.pop(done.ticket, None)
            if keys is not None:
                self._record_answer(keys, done.result)
            else:
                finished += self._ended_transfer(done.ticket, done.result)
        return finished

    def drain(self) -> list[TransferJob]:
        """Wait until no job is under way, at most until the deadlines."""
        longest_s = max(self._settings.load_deadline_s, self._settings.store_deadline_s)
        until_s = self._clock_s() + longest_s + _DRAIN_GRACE_S
        finished = self.poll()
        while len(self.transfers):
            client, left_s = self._link.client, until_s - self._clock_s()
            if client is None or left_s <= 0:
                log.error("Ostraca tier: %d jobs are still under way after the deadline", len(self.transfers))
                break
            select.select([client.fileno()], [], [], left_s)
            finished += self.poll()
        return finished

    def samples(self) -> list[TierSample]:
        """Return the counts since the last call, and the current state."""
        return [
            *self.counters.take(),
            TierSample(INFLIGHT_CHUNKS, "load", self.transfers.loading),
            TierSample(INFLIGHT_CHUNKS, "store", self.transfers.storing),
            TierSample(IS_USABLE, "", int(not self.read_refusal)),
        ]

    def _record_answer(self, keys: tuple[bytes, ...], result: object) -> None:
        if not isinstance(result, LookupResult):
            self.counters.add(LOOKUP_CHUNKS, "error", len(keys))
            self._lookups.record_answers((key, False) for key in keys)
            return
        for chain in result.chains:
            self._count(LOOKUP_CHUNKS, BlockState, chain)
        self._update_backoff(
            self._reads, b"".join(chain.reason_codes for chain in result.chains), _READS_FAIL
        )
        codes = b"".join(chain.state_codes for chain in result.chains)
        self._lookups.record_answers(
            (key, code == BlockState.HIT) for key, code in zip(keys, codes, strict=True)
        )

    def _ended_transfer(self, ticket: Hashable, result: object) -> list[TransferJob]:
        """Account for an ended piece of a job; return the job if finished.

        Chunks reported as present, but missing or damaged, are held off. Unknown tickets are ignored.
        """
        piece = self.transfers.piece(ticket)
        if piece is None:
            return []
        job, keys = piece
        are_good: Sequence[bool] = [False] * len(keys)
        match result:
            case GetResult():
                self._count(LOAD_CHUNKS, BlockState, result)
                self._update_backoff(self._reads, result.reason_codes, _READS_FAIL)
                are_good = [code == BlockState.HIT for code in result.state_codes]
                self.counters.add(LOAD_BYTES, count=sum(are_good) * self._row_bytes)
                pairs = zip(keys, result.state_codes, strict=True)
                false_hits = [key for key, code in pairs if code == BlockState.MISS]
                self._lookups.hold_off(false_hits, self._clock_s())
            case PutResult():
                self._count(STORE_CHUNKS, PutState, result)
                self._update_backoff(self._writes, result.reason_codes, _WRITES_FAIL)
                are_good = [code in _ACCEPTED for code in result.state_codes]
            case _:
                self.counters.add(LOAD_CHUNKS if job.is_load else STORE_CHUNKS, "error", len(keys))
        finished = self.transfers.end(ticket, are_good, self._clock_s())
        return [finished] if finished else []

    def _update_backoff(self, backoff: RequestBackoff, reasons: bytes, bad: frozenset[Reason]) -> None:
        """Report a request's reasons to a backoff: failed if all are in *bad*."""
        if reasons and _LATE.issuperset(reasons):
            backoff.record_late(self._clock_s())
        elif reasons and bad.issuperset(reasons):
            backoff.record_failure(self._clock_s())
        else:
            backoff.record_success()

    def _count(
        self, metric: TierMetric, states: type[BlockState | PutState], result: BlockOutcomes | PutResult
    ) -> None:
        pairs = Counter(zip(result.state_codes, result.reason_codes, strict=True))
        for (state, reason), count in pairs.items():
            self.counters.add(metric, outcome_name(states(state), reason), count)

    # State.

    def _refusal(self, backoff: RequestBackoff) -> str:
        if self._link.volume() is None:
            return "no_fabric"
        return "backoff" if backoff.is_active(self._clock_s()) else ""

    def _recompute_s(self, run: Run) -> float | None:
        """Return the engine's time to compute these chunks; None if unknown."""
        if not self._settings.prefill_tokens_per_s:
            return None
        tokens = len(run.keys) * self._tokens_per_chunk[run.chain.group]
        return tokens / self._settings.prefill_tokens_per_s


def _log_explain_command(volume: Volume, chain: Chain) -> None:
    """Log the command that explains the first of these chunks."""
    span = chain[:1].span()
    log.debug(
        "Ostraca tier: %d chunks under way; explain the first with: "
        "ostraca explain %s --root %s --group %d --volume %s --tenant %s",
        len(chain),
        span.hashes.hex(),
        span.units.hex(),
        span.group,
        volume.name,
        volume.tenant,
    )
