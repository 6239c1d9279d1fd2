"""P7: duration of batch gets after a kill of one of two agents, beside the duration before.

The agents are processes, with a real etcd and half of the blocks each. Two workers repeat a look-up and a get
of a batch. The first worker uses the surviving agent. The second uses the killed agent (SIGKILL) and fails
over to the other. Bytes cross by NIXL. The window of a kill ends once both workers have all blocks again; the
window before the kill has about the same length. A *false claim* is a HIT of a look-up after the kill,
followed by a get without the block. Peers are not covered here, but measured separately.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from benchmarks.support.figure import Figure, Target
from benchmarks.support.pods import can_run, running_pod
from tests.support.fabric.fabric_host import LAYOUT, content, empty, hashes
from tests.support.pod.processes import TTL_S, until
from tests.support.pod.work import BLOCK_BYTES

from ostraca import Ack, BlockState
from ostraca.settings import ClientSettings
from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions
    from tests.support.pod.processes import AgentProcess, Pod

    import ostraca
    from ostraca_fabric.model.chain import Chain

MS = 1e3
_KILLS = 10
_KILLS_SHORT = 1
_BLOCKS = 64
_BEFORE_S = TTL_S + 1.0
_BEFORE_SHORT_S = 0.2
_DEADLINE_S = 10.0
"""Long enough to show every stall."""

_LATE_S = 30.0
_WORKER = ClientSettings()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Look-up and the following get, in seconds of the clock."""

    began_s: float
    got_from_s: float
    ended_s: float
    claimed: int
    falsely: int
    is_whole: bool

    @property
    def longer_s(self) -> float:
        """Duration of the slower of the two."""
        return max(self.got_from_s - self.began_s, self.ended_s - self.got_from_s)


class _Batch:
    """Batch of all workers."""

    def __init__(self) -> None:
        self.content = content(_BLOCKS, 0, BLOCK_BYTES)

    def of(self, client: ostraca.Client) -> tuple[ostraca.Volume, Chain]:
        """Return the batch as chains of a client.

        Each block is placed alone, so that every agent owns some.
        """
        volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        return volume, volume.chain(hashes(_BLOCKS), is_chained=False)


class _Worker:
    """Thread with repeated gets of a batch; use as a context manager."""

    def __init__(self, client: ostraca.Client, batch: _Batch) -> None:
        self.turns: list[_Turn] = []
        self._client = client
        self._batch = batch
        self._is_over = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def has_got_all_since(self, moment_s: float) -> bool:
        """Return whether the last turn began after *moment_s* and found every block."""
        if self._failed is not None:
            raise self._failed
        turns = self.turns[-1:]
        return bool(turns) and turns[0].began_s > moment_s and turns[0].is_whole

    def longest_ms(self, from_s: float, to_s: float) -> float:
        """Return the longest duration of look-ups and gets under way between two moments."""
        took = [turn.longer_s for turn in self.turns if turn.ended_s > from_s and turn.began_s < to_s]
        return MS * max(took, default=0.0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            (volume, chain), expected = self._batch.of(self._client), self._batch.content
            into = empty(_BLOCKS, BLOCK_BYTES)
            while not self._is_over.is_set():
                began_s = time.monotonic()
                found = volume.lookup(chain, deadline_s=_DEADLINE_S)
                got_from_s = time.monotonic()
                got = volume.get(chain, into=into, deadline_s=_DEADLINE_S)
                ended_s = time.monotonic()
                is_hit = np.array([state is BlockState.HIT for state in got.states])
                if not np.array_equal(into[is_hit], expected[is_hit]):
                    raise MeasureError("a get brought wrong bytes")  # noqa: TRY301 (told where it is waited for)
                is_claimed = np.array([state is BlockState.HIT for state in found.states])
                falsely = int(np.count_nonzero(is_claimed & ~is_hit))
                claimed = int(np.count_nonzero(is_claimed))
                self.turns.append(_Turn(began_s, got_from_s, ended_s, claimed, falsely, bool(is_hit.all())))
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            self._failed = error


@dataclass(frozen=True, slots=True)
class _Kill:
    """Effects of a kill on the worker of the surviving agent and on the worker of the killed agent."""

    longest_ms: tuple[float, float]
    before_ms: tuple[float, float]
    claimed: int
    falsely: int


def run(conditions: Conditions) -> list[Figure]:
    """Kill agents."""
    if not can_run("p7"):
        return []
    before_s = _BEFORE_SHORT_S if conditions.is_short else _BEFORE_S
    transport = "inline" if conditions.is_short else "nixl"
    with running_pod(conditions, agents=2, transport=transport) as pod:
        batch = _Batch()
        _put(pod, batch)
        kills = []
        for _ in range(_KILLS_SHORT if conditions.is_short else _KILLS):
            pod.start()
            kills.append(_kill(pod, batch, before_s))
    size = f"{_BLOCKS} × {BLOCK_BYTES >> 10} KiB"
    what = f"longest get of {size} when an agent is killed, of {len(kills)} kills, worker"
    figures = [
        Figure(
            "P7",
            f"{what} at {where}",
            "ms",
            Measurement(
                "killed",
                Series(tuple(kill.longest_ms[number] for kill in kills)),
                "longest before",
                Series(tuple(kill.before_ms[number] for kill in kills)),
            ),
            Target(value_at_most=200.0),
            quantile=1.0,
        )
        for number, where in enumerate(("the other", "that one"))
    ]
    falsely = Series(tuple(float(kill.falsely) for kill in kills))
    claimed = Series(tuple(float(kill.claimed) for kill in kills))
    return [
        *figures,
        Figure(
            "P7",
            "blocks claimed after a kill that could not be got, most of a kill",
            "",
            Measurement("false", falsely, "claimed", claimed),
            Target(value_at_most=0.0),
            quantile=1.0,
        ),
    ]


def _put(pod: Pod, batch: _Batch) -> None:
    with pod.connect(settings=_WORKER) as client:
        volume, chain = batch.of(client)

        def is_put() -> bool:
            put = volume.put(chain, source=batch.content, deadline_s=_DEADLINE_S, ack=Ack.COMMITTED)
            return put.accepted == _BLOCKS

        until(is_put, "the batch is put")


def _kill(pod: Pod, batch: _Batch, before_s: float) -> _Kill:
    """Kill the agent with most shards, and wait until both workers have all blocks again.

    A new owner withholds a quarter of a shard for some seconds. Four owners killed within these seconds
    withhold all free space, and the next owner evicts blocks. So the kill waits until no space is withheld.
    """
    pod.await_retired(within_s=_LATE_S)
    dying = pod.owner()
    (other,) = (agent for agent in pod.agents if agent is not dying)
    with contextlib.ExitStack() as both:
        workers = [_worker_at(both, pod, agent, batch) for agent in (other, dying)]
        begun_s = time.monotonic()
        until(lambda: _have_all(workers, begun_s), "every block is got before the kill")
        begun_s = time.monotonic()
        threading.Event().wait(before_s)
        killed_s = time.monotonic()
        dying.signal(signal.SIGKILL)
        until(lambda: _have_all(workers, killed_s), "every block is got again", within_s=_LATE_S)
        back_s = time.monotonic()
        dying.ended()
    since = [turn for worker in workers for turn in worker.turns if turn.began_s > killed_s]
    longest, before = (
        tuple(worker.longest_ms(from_s, to_s) for worker in workers)
        for from_s, to_s in ((killed_s, back_s), (begun_s, killed_s))
    )
    return _Kill(
        (longest[0], longest[1]),
        (before[0], before[1]),
        sum(turn.claimed for turn in since),
        sum(turn.falsely for turn in since),
    )


def _worker_at(both: contextlib.ExitStack, pod: Pod, agent: AgentProcess, batch: _Batch) -> _Worker:
    return both.enter_context(_Worker(both.enter_context(pod.connect(agent, settings=_WORKER)), batch))


def _have_all(workers: list[_Worker], since_s: float) -> bool:
    return all(worker.has_got_all_since(since_s) for worker in workers)
