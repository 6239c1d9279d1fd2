"""Operations of a connector that are under way with the fabric.

The class submits operations, and converts ended operations into answers and finished jobs. It limits the
chunks under way, backs off from a fabric without answers, and counts. Only ``drain`` waits.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ostraca.connectors.kv_identity.chains import Run
from ostraca.connectors.transfers.counters import (
    ACCEPTED,
    INFLIGHT_CHUNKS,
    IS_USABLE,
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    OFFERED_CHUNKS,
    REQUESTS,
    STORE_CHUNKS,
    ConnectorCounters,
    ConnectorMetric,
    MetricSample,
)
from ostraca.connectors.transfers.explain_command import explain_command
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.failed_loads import FailedLoads
from ostraca.connectors.transfers.health import FabricHealth
from ostraca.connectors.transfers.jobs import RowJob, TransferJob, Transfers
from ostraca.connectors.transfers.rows import Blocks, Rows
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca.results import GetResult, LookupResult, PutResult
from ostraca.volume import Volume
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import BlockState, PutState, Reason

_DRAIN_GRACE_S = 1.0
"""Extra wait of ``drain`` beyond the longest deadline, before an error is logged."""


_GONE = frozenset({Reason.NOT_FOUND, Reason.DAMAGED, Reason.WRONG_LENGTH})
"""Reasons of a load for chunks that the fabric does not have; others may pass."""

_Ticket = TypeVar("_Ticket")

Answer = tuple[bytes, bool]
"""A chunk, and whether the fabric has the chunk."""


class Ended(NamedTuple):
    """Results of operations that ended."""

    jobs: list[TransferJob]
    answers: list[Answer]
    lost: list[bytes]
    """Chunks of lookups and loads that the fabric does not have."""


class FabricOperations:
    """Lookups, loads and stores under way. Not thread-safe, but calls may come from any thread."""

    def __init__(
        self,
        link: FabricLink,
        settings: ConnectorSettings,
        rows: Rows,
        *,
        tokens_per_chunk: Mapping[int, int],
        clock_s: Callable[[], float],
    ) -> None:
        self.counters = ConnectorCounters()
        self.failed_loads = FailedLoads(entries_max=settings.failed_chunks_max, hold_s=settings.failed_hold_s)
        self.health = FabricHealth(settings, is_linked=lambda: link.volume() is not None, clock_s=clock_s)
        self._link = link
        self._settings = settings
        self._rows: Rows | None = rows
        self._row_bytes = rows.row_bytes
        self._tokens_per_chunk = tokens_per_chunk
        self._clock_s = clock_s
        self._log = logging.getLogger(settings.LOGGER)
        self._pending_lookups: dict[Hashable, Sequence[Run]] = {}
        """Submitted lookups: the runs of each."""
        self._prefetches: dict[Hashable, int] = {}
        """Submitted prefetches, and their chunks."""
        self._transfers = Transfers()
        self._ended = Ended([], [], [])

    @property
    def has_work(self) -> bool:
        """Whether jobs are under way, or finished and not yet polled."""
        return bool(len(self._transfers) or self._ended.jobs)

    @property
    def can_submit_lookup(self) -> bool:
        """Whether another lookup may be sent."""
        return len(self._pending_lookups) < self._settings.lookups_inflight_max

    # Sending.

    def submit_lookup(self, runs: Sequence[Run]) -> bool:
        """Send one lookup; ``poll`` returns the answers. False if not sent."""
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
        self._pending_lookups[ticket] = runs
        return True

    def load(self, job: RowJob, runs: Sequence[Run], unplaced: Sequence[bytes]) -> None:
        """Start to fill the rows of a job; ``poll`` returns the finished job.

        Rows of failed chunks have undefined bytes then. Nothing is written after the job's end.
        """
        row_of = self._begin(job, LOAD_CHUNKS, unplaced)
        refusal = self.health.read_refusal
        for run in runs:
            room = self._settings.loads_inflight_chunks_max - self._transfers.loading
            if refusal or len(run.keys) > room:
                self._refuse(job, run.keys, LOAD_CHUNKS, refusal or "too_many")
                continue
            into = self._blocks(row_of, run.keys)
            ticket = self._submit(
                "load",
                lambda volume, run=run, into=into: volume.submit_get(  # type: ignore[misc]  # default arguments
                    run.chain,
                    into=into,
                    deadline_s=self._settings.load_deadline_s,
                    recompute_s=self._recompute_s(run),
                ),
            )
            self._begin_piece(job, ticket, run, LOAD_CHUNKS)
        self._seal(job)

    def store(
        self, job: RowJob, runs: Sequence[Run], unplaced: Sequence[bytes], *, ttl_s: float | None = None
    ) -> None:
        """Start to store the rows of a job in the fabric; ``poll`` returns the finished job.

        The rows must not change until then. *ttl_s* is as in ``Volume.put``.
        """
        self.counters.add(OFFERED_CHUNKS, count=len(job.keys))
        row_of = self._begin(job, STORE_CHUNKS, unplaced)
        refusal = self.health.write_refusal
        for run in runs:
            room = max(0, self._settings.stores_inflight_chunks_max - self._transfers.storing)
            # A prefix is worth more than later chunks, so drop the end.
            kept = Run(run.chain[:room], () if refusal else run.keys[:room])
            self._refuse(job, run.keys[len(kept.keys) :], STORE_CHUNKS, refusal or "too_many")
            if not kept.keys:
                continue
            source = self._blocks(row_of, kept.keys)
            ticket = self._submit(
                "store",
                lambda volume, kept=kept, source=source: volume.submit_put(  # type: ignore[misc]  # default arguments
                    kept.chain,
                    source=source,
                    deadline_s=self._settings.store_deadline_s,
                    ttl_s=ttl_s,
                ),
            )
            self._begin_piece(job, ticket, kept, STORE_CHUNKS)
        self._seal(job)

    def prefetch(self, runs: Sequence[Run]) -> None:
        """Ask the agent to load chunks into its memory, within the limit of loads; no answer follows."""
        for run in runs:
            under_way = sum(self._prefetches.values()) + len(run.keys)
            if self.health.read_refusal or under_way > self._settings.loads_inflight_chunks_max:
                return
            ticket = self._submit(
                "prefetch",
                lambda volume, run=run: volume.submit_prefetch(  # type: ignore[misc]  # a default argument
                    run.chain, deadline_s=self._settings.load_deadline_s
                ),
            )
            if ticket is not None:
                self._prefetches[ticket] = len(run.keys)

    def end_session(self, runs: Sequence[Run]) -> None:
        """Tell the fabric that no later request of this session will read these chunks."""
        if runs:
            self._submit("end_session", lambda volume: volume.end_session([run.chain for run in runs]))

    def _begin(self, job: RowJob, metric: ConnectorMetric, unplaced: Sequence[bytes]) -> dict[bytes, int]:
        """Begin a job; return the row of each chunk."""
        is_load = metric is LOAD_CHUNKS
        self._transfers.begin(job.job_id, request=job.request, is_load=is_load, now_s=self._clock_s())
        self._refuse(job, unplaced, metric, "unplaced")
        return dict(zip(job.keys, job.rows, strict=True))

    def _refuse(self, job: RowJob, keys: Sequence[bytes], metric: ConnectorMetric, reason: str) -> None:
        """Mark chunks of a begun job as failed without an attempt."""
        self._transfers.refuse(job.job_id, keys)
        self.counters.add(metric, reason, len(keys))

    def _seal(self, job: RowJob) -> None:
        finished = self._transfers.seal(job.job_id, self._clock_s())
        if finished is not None:
            self._ended.jobs.append(finished)

    def _submit(self, operation: str, submit: Callable[[Volume], _Ticket]) -> _Ticket | None:
        """Submit to the open volume; return the ticket, or None if not sent."""
        volume = self._link.volume()
        if volume is None:
            return None
        try:
            ticket = submit(volume)
        except OstracaError as error:
            self._log.warning("Ostraca: a %s could not be submitted: %s", operation, error)
            return None
        self.counters.add(REQUESTS, operation)
        return ticket

    def _begin_piece(self, job: RowJob, ticket: Hashable, run: Run, metric: ConnectorMetric) -> None:
        if ticket is None:
            self._refuse(job, run.keys, metric, "not_submitted")
            return
        self._transfers.add(job.job_id, ticket, run.keys)
        self._log_explain_command(run.chain, f"{len(run.keys)} chunks under way")

    # Ended operations.

    def poll(self) -> Ended:
        """Return the results of operations that ended since the last call."""
        self._take_completions()
        ended, self._ended = self._ended, Ended([], [], [])
        return ended

    def _take_completions(self) -> None:
        client = self._link.client
        for done in client.take_completions() if client else ():
            if done.error is not None:
                self._log.warning("Ostraca: a request ended with an error: %s", done.error)
            if self._prefetches.pop(done.ticket, None) is not None:
                continue
            runs = self._pending_lookups.pop(done.ticket, None)
            if runs is not None:
                self._ended.answers.extend(self._answers(runs, done.result))
            else:
                self._ended.jobs.extend(self._ended_transfer(done.ticket, done.result))

    def drain(self) -> None:
        """Wait until no job is under way, at most until the deadlines; ``poll`` returns the results."""
        longest_s = max(self._settings.load_deadline_s, self._settings.store_deadline_s)
        if not self._wait(lambda: not len(self._transfers), longest_s + _DRAIN_GRACE_S):
            self._log.error("Ostraca: %d jobs are still under way after the deadline", len(self._transfers))

    def close(self) -> None:
        """Wait for the stores under way, at most ``close_deadline_s``, and end the connection.

        Lets go of the engine's memory, and logs the share of dropped chunks. ``poll`` returns the results.
        """
        self._wait(lambda: not self._transfers.storing, self._settings.close_deadline_s)
        self._link.close()
        self._take_completions()
        drops = self.counters.drops()
        if drops:
            self._log.info("Ostraca: %s", drops)
        self._rows = None

    def _wait(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Take completions until *is_over*; False if not over within the time."""
        until_s = self._clock_s() + within_s
        self._take_completions()
        while not is_over():
            client, left_s = self._link.client, until_s - self._clock_s()
            if client is None or left_s <= 0:
                return False
            ended = select.poll()  # select takes no descriptor above 1023, of a busy engine
            ended.register(client.fileno(), select.POLLIN)
            ended.poll(left_s * 1000)
            self._take_completions()
        return True

    def samples(self) -> list[MetricSample]:
        """Return the counts since the last call, and the current state."""
        return [
            *self.counters.take(),
            MetricSample(INFLIGHT_CHUNKS, "load", self._transfers.loading),
            MetricSample(INFLIGHT_CHUNKS, "store", self._transfers.storing),
            MetricSample(IS_USABLE, "", int(not self.health.read_refusal)),
        ]

    def _answers(self, runs: Sequence[Run], result: object) -> list[Answer]:
        keys = [key for run in runs for key in run.keys]
        if not isinstance(result, LookupResult):
            self.counters.add(LOOKUP_CHUNKS, "error", len(keys))
            return [(key, False) for key in keys]
        codes = b"".join(chain.state_codes for chain in result.chains)
        reasons = b"".join(chain.reason_codes for chain in result.chains)
        self.counters.add_outcomes(LOOKUP_CHUNKS, BlockState, codes, reasons)
        self.health.record_read(reasons)
        if BlockState.HIT not in codes:
            self._log_explain_command(runs[0].chain, f"none of {len(keys)} chunks is found")
        pairs = zip(keys, reasons, strict=True)
        self._ended.lost.extend(key for key, reason in pairs if reason == Reason.NOT_FOUND)
        return [(key, code == BlockState.HIT) for key, code in zip(keys, codes, strict=True)]

    def _ended_transfer(self, ticket: Hashable, result: object) -> list[TransferJob]:
        """Account for an ended piece of a job; return the job if finished.

        Chunks reported as present, but missing or damaged, are held off. Unknown tickets are ignored.
        """
        piece = self._transfers.piece(ticket)
        if piece is None:
            return []
        job, keys = piece
        are_good: Sequence[bool] = [False] * len(keys)
        match result:
            case GetResult():
                self.counters.add_outcomes(LOAD_CHUNKS, BlockState, result.state_codes, result.reason_codes)
                self.health.record_read(result.reason_codes)
                are_good = [code == BlockState.HIT for code in result.state_codes]
                self.counters.add(LOAD_BYTES, count=sum(are_good) * self._row_bytes)
                outcomes = list(zip(keys, result.state_codes, result.reason_codes, strict=True))
                # After a reconnect, lookups are to find the chunks again.
                missed = [
                    key
                    for key, code, why in outcomes
                    if code == BlockState.MISS and why != Reason.DISCONNECTED
                ]
                self.failed_loads.add(missed, self._clock_s())
                self._ended.lost.extend(key for key, _, why in outcomes if why in _GONE)
            case PutResult():
                self.counters.add_outcomes(STORE_CHUNKS, PutState, result.state_codes, result.reason_codes)
                self.health.record_write(result.reason_codes)
                are_good = [code in ACCEPTED for code in result.state_codes]
            case _:
                self.counters.add(LOAD_CHUNKS if job.is_load else STORE_CHUNKS, "error", len(keys))
        finished = self._transfers.end(ticket, are_good, self._clock_s())
        return [finished] if finished else []

    def _blocks(self, row_of: Mapping[bytes, int], keys: Sequence[bytes]) -> Blocks:
        assert self._rows is not None, "the connector is closed"
        return self._rows.blocks([row_of[key] for key in keys])

    def _recompute_s(self, run: Run) -> float | None:
        """Return the engine's time to compute these chunks; None if unknown."""
        if not self._settings.prefill_tokens_per_s:
            return None
        tokens = len(run.keys) * self._tokens_per_chunk[run.chain.group]
        return tokens / self._settings.prefill_tokens_per_s

    def _log_explain_command(self, chain: Chain, news: str) -> None:
        """Log the command that explains the first of these chunks."""
        volume = self._link.volume()
        if volume is not None and self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("Ostraca: %s; explain the first with: %s", news, explain_command(volume, chain))
