"""Traffic: what the tier has under way with the fabric.

It submits, makes of what has ended answers to questions or finished jobs, decides when the fabric is to be
left alone for a while, and counts. Nothing here waits, but ``drain``.
"""

from __future__ import annotations

import logging
import select
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ostraca.connectors.vllm.core.transfers import Finished, Transfers
from ostraca.connectors.vllm.counters import (
    INFLIGHT_CHUNKS,
    IS_USABLE,
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    REQUESTS,
    STORE_CHUNKS,
    Counters,
    Sample,
    outcome_name,
)
from ostraca.connectors.vllm.settings import LOGGER
from ostraca.results import GetResult, LookupResult, PutResult
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.outcome import BlockState, PutState, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.connectors.vllm.core.pause import Pause
    from ostraca.connectors.vllm.core.prefix import Run
    from ostraca.connectors.vllm.counters import Metric
    from ostraca.connectors.vllm.link import Link
    from ostraca.connectors.vllm.settings import TierSettings
    from ostraca.results import BlockOutcomes
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain

    Rows = Mapping[bytes, NDArray[np.uint8]]
    """The row of each key of a job."""

log = logging.getLogger(LOGGER)

_LATE = frozenset({Reason.DEADLINE})
"""A request that ends with nothing but this was not answered in time."""

_READS_FAIL = _LATE | {Reason.DISCONNECTED}
"""A read that ends with nothing but these, not all late, found nobody."""

_WRITES_FAIL = _READS_FAIL | {
    Reason.OVERLOADED,
    Reason.NO_SPACE,
    Reason.INDEX_FULL,
    Reason.NO_OWNER,
    Reason.FENCED,
    Reason.SWITCHED_OFF,
    Reason.QUARANTINED,
    Reason.UNHEARD,
    Reason.QUOTA,
}
"""A store that ends with nothing but these, not all late, would only meet the same again."""

_ACCEPTED = frozenset({PutState.STAGED, PutState.COMMITTED, PutState.EXISTS})

_DRAIN_GRACE_S = 1.0
"""How much longer than the longest deadline ``drain`` waits before it says that something is wrong."""


class Answer(NamedTuple):
    """What was found out about chunks."""

    keys: tuple[bytes, ...]
    are_there: tuple[bool, ...]


class Gone(NamedTuple):
    """Chunks that were said to be there and were not, or did not verify."""

    keys: tuple[bytes, ...]


class Traffic:
    """Questions, loads and stores under way."""

    def __init__(
        self,
        link: Link,
        settings: TierSettings,
        *,
        row_bytes: int,
        tokens_per_chunk: Mapping[int, int],
        clock_s: Callable[[], float],
    ) -> None:
        self.counters = Counters()
        self.transfers = Transfers()
        self._link = link
        self._settings = settings
        self._row_bytes = row_bytes
        self._tokens_per_chunk = tokens_per_chunk
        self._clock_s = clock_s
        self._questions: dict[Hashable, tuple[bytes, ...]] = {}
        """Submitted look-ups: the chunks of each, chain after chain."""
        self._reads = settings.pause()
        self._writes = settings.pause()

    @property
    def why_no_reads(self) -> str:
        """Why nothing can be asked or loaded now; empty when it can."""
        return self._why_not(self._reads)

    @property
    def why_no_writes(self) -> str:
        """Why nothing can be stored now; empty when it can."""
        return self._why_not(self._writes)

    @property
    def has_room_to_ask(self) -> bool:
        """Whether another question may be sent."""
        return len(self._questions) < self._settings.lookups_inflight_max

    # Sending.

    def ask(self, runs: Sequence[Run]) -> bool:
        """Send one question; ``poll`` brings the answer. False when it could not be sent."""
        volume = self._volume()
        if volume is None:
            return False
        try:
            ticket = volume.submit_lookup(
                [run.chain for run in runs],
                pin_s=self._settings.pin_s,
                deadline_s=self._settings.lookup_deadline_s,
            )
        except OstracaError as error:
            log.warning("Ostraca tier: a look-up could not be submitted: %s", error)
            return False
        self.counters.add(REQUESTS, "lookup")
        self._questions[ticket] = tuple(key for run in runs for key in run.keys)
        return True

    def load(self, job_id: int, runs: Sequence[Run], rows: Rows) -> None:
        """Send a begun job's loads, as many as the limit lets."""
        for run in runs:
            volume = self._volume()
            if self.transfers.loading + len(run.keys) > self._settings.loads_inflight_chunks_max:
                self.refuse(job_id, run.keys, LOAD_CHUNKS, "too_many")
                continue
            try:
                ticket = volume and volume.submit_get(
                    run.chain,
                    into=[rows[key] for key in run.keys],
                    deadline_s=self._settings.load_deadline_s,
                    recompute_s=self._recompute_s(run),
                )
            except OstracaError as error:
                log.warning("Ostraca tier: a load could not be submitted: %s", error)
                ticket = None
            self._sent(job_id, ticket, run.keys, LOAD_CHUNKS, "load")
            _tell("loads", volume, run.chain)

    def store(self, job_id: int, runs: Sequence[Run], rows: Rows) -> None:
        """Send a begun job's stores, as many as the limit lets."""
        for run in runs:
            volume = self._volume()
            room = max(0, self._settings.stores_inflight_chunks_max - self.transfers.storing)
            # A prefix is worth more than what follows it, so what does not fit is the end.
            kept = run.keys[:room]
            self.refuse(job_id, run.keys[room:], STORE_CHUNKS, "too_many")
            if not kept:
                continue
            chain = run.chain[: len(kept)]
            try:
                ticket = volume and volume.submit_put(
                    chain,
                    source=[rows[key] for key in kept],
                    deadline_s=self._settings.store_deadline_s,
                )
            except OstracaError as error:
                log.warning("Ostraca tier: a store could not be submitted: %s", error)
                ticket = None
            self._sent(job_id, ticket, kept, STORE_CHUNKS, "store")
            _tell("stores", volume, chain)

    def refuse(self, job_id: int, keys: Sequence[bytes], metric: Metric, why: str) -> None:
        """Do not try these chunks of a begun job."""
        self.transfers.refused(job_id, keys)
        self.counters.add(metric, why, len(keys))

    def _sent(
        self, job_id: int, ticket: Hashable | None, keys: tuple[bytes, ...], metric: Metric, operation: str
    ) -> None:
        if ticket is None:
            self.refuse(job_id, keys, metric, "not_submitted")
        else:
            self.counters.add(REQUESTS, operation)
            self.transfers.sent(job_id, ticket, keys)

    # What was sent and has ended.

    def poll(self) -> list[Answer | Gone | Finished]:
        """Return what has become of what was sent, in order."""
        client = self._link.client
        found: list[Answer | Gone | Finished] = []
        for done in client.take_done() if client else ():
            if done.error is not None:
                log.warning("Ostraca tier: a request ended with an error: %s", done.error)
            keys = self._questions.pop(done.ticket, None)
            if keys is not None:
                found.append(self._answer(keys, done.result))
            else:
                found.extend(self._moved(done.ticket, done.result))
        return found

    def drain(self) -> list[Answer | Gone | Finished]:
        """Wait until nothing is being moved; deadlines bound it."""
        longest_s = max(self._settings.load_deadline_s, self._settings.store_deadline_s)
        until_s = self._clock_s() + longest_s + _DRAIN_GRACE_S
        found = self.poll()
        while len(self.transfers):
            client, left_s = self._link.client, until_s - self._clock_s()
            if client is None or left_s <= 0:
                log.error("Ostraca tier: %d jobs did not end by their deadline", len(self.transfers))
                break
            select.select([client.fileno()], [], [], left_s)
            found.extend(self.poll())
        return found

    def samples(self) -> list[Sample]:
        """Return what was counted since the last time, and how things stand."""
        return [
            *self.counters.take(),
            Sample(INFLIGHT_CHUNKS, "load", self.transfers.loading),
            Sample(INFLIGHT_CHUNKS, "store", self.transfers.storing),
            Sample(IS_USABLE, "", int(not self.why_no_reads)),
        ]

    def _answer(self, keys: tuple[bytes, ...], result: object) -> Answer:
        if not isinstance(result, LookupResult):
            self.counters.add(LOOKUP_CHUNKS, "error", len(keys))
            return Answer(keys, (False,) * len(keys))
        for chain in result.chains:
            self._count(LOOKUP_CHUNKS, BlockState, chain)
        self._weigh(self._reads, b"".join(chain.reason_codes for chain in result.chains), _READS_FAIL)
        codes = b"".join(chain.state_codes for chain in result.chains)
        return Answer(keys, tuple(code == BlockState.HIT for code in codes))

    def _moved(self, ticket: Hashable, result: object) -> list[Gone | Finished]:
        """Account for a piece of a job. Of a job that is not ours any more there is nothing to tell."""
        piece = self.transfers.piece(ticket)
        if piece is None:
            return []
        are_good: Sequence[bool] = [False] * len(piece.keys)
        found: list[Gone | Finished] = []
        match result:
            case GetResult():
                self._count(LOAD_CHUNKS, BlockState, result)
                self._weigh(self._reads, result.reason_codes, _READS_FAIL)
                are_good = [code == BlockState.HIT for code in result.state_codes]
                self.counters.add(LOAD_BYTES, count=sum(are_good) * self._row_bytes)
                pairs = zip(piece.keys, result.state_codes, strict=True)
                found.append(Gone(tuple(key for key, code in pairs if code == BlockState.MISS)))
            case PutResult():
                self._count(STORE_CHUNKS, PutState, result)
                self._weigh(self._writes, result.reason_codes, _WRITES_FAIL)
                are_good = [code in _ACCEPTED for code in result.state_codes]
            case _:
                metric = LOAD_CHUNKS if self.transfers.is_load(piece.job_id) else STORE_CHUNKS
                self.counters.add(metric, "error", len(piece.keys))
        finished = self.transfers.ended(ticket, are_good, self._clock_s())
        return [*found, finished] if finished else found

    def _weigh(self, pause: Pause, reasons: bytes, bad: frozenset[Reason]) -> None:
        """Tell a pause what a request met: it fails when every block of it met one of the *bad* reasons."""
        if reasons and _LATE.issuperset(reasons):
            pause.late(self._clock_s())
        elif reasons and bad.issuperset(reasons):
            pause.failed(self._clock_s())
        else:
            pause.succeeded()

    def _count(
        self, metric: Metric, states: type[BlockState | PutState], result: BlockOutcomes | PutResult
    ) -> None:
        pairs = Counter(zip(result.state_codes, result.reason_codes, strict=True))
        for (state, reason), count in pairs.items():
            self.counters.add(metric, outcome_name(states(state), reason), count)

    # Small answers.

    def _volume(self) -> Volume | None:
        lane = self._link.now()
        return lane.volume if lane else None

    def _why_not(self, pause: Pause) -> str:
        if self._link.now() is None:
            return "no_fabric"
        return "paused" if pause.holds(self._clock_s()) else ""

    def _recompute_s(self, run: Run) -> float | None:
        """Return how long the engine would take to compute these chunks; None when nobody said."""
        if not self._settings.prefill_tokens_per_s:
            return None
        tokens = len(run.keys) * self._tokens_per_chunk[run.chain.group]
        return tokens / self._settings.prefill_tokens_per_s


def _tell(does: str, volume: Volume | None, chain: Chain) -> None:
    """Log the command that tells more of the first of these chunks."""
    if volume is None or not log.isEnabledFor(logging.DEBUG):
        return
    span = chain[:1].span()
    log.debug(
        "Ostraca tier: %s %d chunks; of the first, tells more: "
        "ostraca explain %s --root %s --group %d --volume %s --tenant %s",
        does,
        len(chain),
        span.hashes.hex(),
        span.units.hex(),
        span.group,
        volume.name,
        volume.record.tenant,
    )
