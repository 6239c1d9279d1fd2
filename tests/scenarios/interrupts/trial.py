"""A worker whose main thread is interrupted at random moments, and what must hold all the same.

A timer signal comes some microseconds to milliseconds after an operation begins, and its handler raises. Then
the next operation must end by its deadline with the right bytes, nothing may be written to the interrupted
operation's memory any more, and in the end every slot, request, descriptor and thread is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
from numpy.typing import NDArray
from tests.support.invariants import check_ledger

import ostraca
from ostraca import aio

MIB = 1 << 20
ARENA_BYTES = 16 * MIB
BLOCK_BYTES = 64 << 10
BLOCKS = 8
CHAINS = 4
DEADLINE_S = 5.0
HANG_S = 30
"""A trial whose one round takes longer has hung: its stacks are shown and it ends."""

LONGEST_S = 0.004
"""Until an interrupt: most operations of a quiet machine take less."""

LAYOUT = ostraca.Layout(model="interrupted", dtype="bf16", page_tokens=16)
FILL = 0x77


class Interrupted(BaseException):
    """What the signal handler raises."""


@dataclass
class Tally:
    """What happened."""

    rounds: Counter[str] = field(default_factory=Counter)
    interrupts: int = 0
    wrong: list[str] = field(default_factory=list)

    front_end: str = ""
    """Of the round that goes on."""

    def check(self, is_right: bool, words: str) -> None:
        """Note what must not be."""
        if not is_right:
            self.wrong.append(f"{self.front_end}: {words}")


class Trial:
    """One client under interrupts."""

    def __init__(self, address: str, *, transports: tuple[str, ...], seed: int) -> None:
        self.tally = Tally()
        self._dice = random.Random(seed)
        self._seed = seed
        self._made = 0
        self._settings = ostraca.ClientSettings(
            arena_bytes=ARENA_BYTES,
            chunk_bytes=4 * MIB,
            transports=transports,
            quarantine_bytes_max=ARENA_BYTES,
            direct_memory=seed % 2 == 0,
        )
        self._client = ostraca.connect(address, settings=self._settings)
        self._volume = self._client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self._stored = [self._store(number) for number in range(CHAINS)]
        self._front_ends: dict[str, Callable[[], None]] = {
            "blocking": self._blocking,
            "tickets": self._tickets,
            "asyncio": self._asyncio,
            "refused": self._refused,
            "cancelled": self._cancelled,
            "late": self._late,
            "views": self._views,
            "slots": self._slots,
        }

    def _store(self, number: int) -> tuple[ostraca.Chain, NDArray[np.uint8]]:
        chain = self._volume.chain(self._hashes(f"stored {number}"))
        source = np.full((BLOCKS, BLOCK_BYTES), number + 1, np.uint8)
        put = self._volume.put(chain, source=source, deadline_s=DEADLINE_S, ack=ostraca.Ack.COMMITTED)
        assert put.accepted == BLOCKS, put
        return chain, source

    def _hashes(self, name: str) -> list[bytes]:
        dice = random.Random(f"{self._seed} {name}")
        return [dice.randbytes(32) for _ in range(BLOCKS)]

    def run(self, is_enough: Callable[[Tally], bool]) -> Tally:
        """Go on until it is enough."""
        signal.signal(signal.SIGALRM, _alarm.ring)
        for front_end in self._front_ends:
            self._round(
                front_end, self._front_ends[front_end]
            )  # threads and descriptors that come with the first use
        self._await_rest()
        before = self._books()
        while not is_enough(self.tally) and not self.tally.wrong:
            front_end = self._dice.choice(list(self._front_ends))
            self._round(front_end, self._front_ends[front_end])
        faulthandler.cancel_dump_traceback_later()
        self._await_rest()
        after = self._books()
        self.tally.check(after == before, f"books before {before}, after {after}")
        begun_s = time.monotonic()
        self._client.close()
        self.tally.check(time.monotonic() - begun_s < 5, "close took more than 5 s")
        return self.tally

    def _round(self, front_end: str, act: Callable[[], None]) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self.tally.rounds[front_end] += 1
        self.tally.front_end = front_end
        act()

    def _interrupted(self, act: Callable[[], object]) -> bool:
        """Do something, and tell whether it was interrupted."""
        try:
            self._arm()
            act()
            _alarm.disarm()
        except Interrupted:
            self.tally.interrupts += 1
            return True
        finally:
            _alarm.disarm()
        return False

    def _arm(self) -> None:
        _alarm.arm(self._dice.random() * LONGEST_S + 1e-6)

    def _check_next(self, interrupted: NDArray[np.uint8] | None = None) -> None:
        """Check that a get works, and that nothing more is written to an interrupted operation's memory."""
        if interrupted is not None:
            interrupted[:] = FILL
        chain, source = self._dice.choice(self._stored)
        into = np.zeros_like(source)
        begun_s = time.monotonic()
        got = self._volume.get(chain, into=into, deadline_s=DEADLINE_S)
        self.tally.check(time.monotonic() - begun_s < DEADLINE_S + 0.5, "the next get missed its deadline")
        self.tally.check(got.hits == BLOCKS, f"the next get: {got}")
        self.tally.check(
            got.hits < BLOCKS or np.array_equal(into, source), "the next get brought wrong bytes"
        )
        if interrupted is not None:
            self.tally.check(bool((interrupted == FILL).all()), "bytes landed after an operation had ended")

    # One round each.

    def _blocking(self) -> None:
        chain, _ = self._dice.choice(self._stored)
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        acts: list[Callable[[], object]] = [
            lambda: self._volume.get(chain, into=into, deadline_s=DEADLINE_S),
            lambda: self._volume.put(self._new_chain(), source=into, deadline_s=DEADLINE_S),
            lambda: self._volume.lookup(chain, deadline_s=DEADLINE_S),
            lambda: self._volume.prefetch(chain, deadline_s=DEADLINE_S),
            lambda: self._volume.end_session(chain),
            lambda: self._client.status(timeout_s=DEADLINE_S),
            lambda: self._client.metrics().openmetrics(),
            lambda: self._client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES),
        ]
        if self._interrupted(self._dice.choices(acts, weights=(8, 4, 2, 1, 1, 1, 1, 1))[0]):
            self._check_next(into)

    def _new_chain(self) -> ostraca.Chain:
        self._made += 1
        return self._volume.chain(self._hashes(f"new {self._made}"))

    def _tickets(self) -> None:
        chain, _ = self._dice.choice(self._stored)
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)

        def submit_and_take() -> None:
            self._volume.submit_get(chain, into=into, deadline_s=DEADLINE_S)
            self._take_one()

        if self._interrupted(submit_and_take):
            # Submitted or not, taken or not: once the client has nothing under way, the memory is ours.
            self._client._runner.do(lambda: None)  # comes behind what was submitted
            self._await_rest()
            self._client._runner.do(lambda: None)  # comes behind the delivery of what has ended
            self._client.take_completions()
            self._check_next(into)

    def _take_one(self) -> list[ostraca.Completion]:
        """Take what has ended; a call that was interrupted may have left the descriptor readable."""
        until_s = time.monotonic() + DEADLINE_S
        while not (taken := self._client.take_completions()) and (left_s := until_s - time.monotonic()) > 0:
            select.select([self._client.fileno()], [], [], left_s)
        if not taken:
            faulthandler.dump_traceback()  # of all threads: which one was in the way?
        return taken

    def _asyncio(self) -> None:
        """Interrupt a loop as its users do: a SIGINT that cancels its main task."""
        chain, source = self._dice.choice(self._stored)
        into = np.zeros_like(source)

        async def get() -> None:
            volume = aio.AsyncVolume(self._volume)
            try:
                self._arm()
                await volume.get(chain, into=into, deadline_s=DEADLINE_S)
            finally:
                _alarm.disarm()

        _alarm.act = lambda: signal.raise_signal(signal.SIGINT)
        try:
            with asyncio.Runner() as runner:
                runner.run(get())
        except KeyboardInterrupt:
            self.tally.interrupts += 1
            self._check_next(into)
        finally:
            _alarm.act = _interrupt

    def _refused(self) -> None:
        chain, _ = self._dice.choice(self._stored)
        with contextlib.suppress(ostraca.UsageError):
            self._volume.get(chain, into=bytearray(3), deadline_s=DEADLINE_S)
            self.tally.wrong.append("a get into three bytes was not refused")

    def _cancelled(self) -> None:
        chain, _ = self._dice.choice(self._stored)
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self._client.cancel(self._volume.submit_get(chain, into=into, deadline_s=DEADLINE_S))
        self.tally.check(len(self._take_one()) == 1, "a cancelled ticket did not end")
        self._check_next(into)

    def _late(self) -> None:
        chain, _ = self._dice.choice(self._stored)
        into = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self._volume.get(chain, into=into, deadline_s=self._dice.random() * 0.002)
        self._check_next(into)

    def _views(self) -> None:
        chain, source = self._dice.choice(self._stored)

        def look() -> None:
            with self._volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=DEADLINE_S) as views:
                seen = views[BLOCKS - 1]
                is_right = seen is None or seen == source[-1].data
                self.tally.check(is_right, "a view showed wrong bytes")

        if self._interrupted(look):
            self._check_next()

    def _slots(self) -> None:
        def put() -> None:
            with self._volume.slots(BLOCKS, lengths=BLOCK_BYTES) as lease:
                lease[0][:8] = b"something"[:8]
                self._volume.put_slots(self._new_chain(), lease, deadline_s=DEADLINE_S)

        if self._interrupted(put):
            self._check_next()

    # In the end.

    def _await_rest(self) -> None:
        """Wait until the agent has said of all slots that it is done with them."""
        until_s = time.monotonic() + DEADLINE_S
        while any(self._under_way()) and time.monotonic() < until_s:
            time.sleep(0.0005)

    def _under_way(self) -> tuple[int, int, int, bool]:
        session = self._client._runtime.connections.session
        assert session is not None
        return (
            len(session._inflight),
            self._client.quarantined_bytes,
            len(self._client._runner._driver._active),
            self._client._runtime.connections.callers._is_running,
        )

    def _books(self) -> dict[str, object]:
        return self._client._runner.do(self._read_books)  # behind all that was dropped

    def _read_books(self) -> dict[str, object]:
        ledger = self._client._runtime.arena.ledger
        own = len(self._client._runtime.connections.callers._still_open())
        with self._client._runtime.arena.changed:
            check_ledger(ledger)
        return {
            "under way": self._under_way(),
            "taken bytes": ledger._pool.taken_bytes,
            "ledger": len(ledger._entries),
            "users": self._client._runtime.connections.session._users
            if self._client._runtime.connections.session
            else None,
            "descriptors": len(list(Path("/proc/self/fd").iterdir())) - own,
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }


def _interrupt() -> None:
    raise Interrupted


class _Alarm:
    """A timer whose signal does something while it is armed.

    Python may run a handler long after the signal came, when other threads had the interpreter meanwhile. So
    a handler that comes when the alarm was disarmed does nothing.
    """

    def __init__(self) -> None:
        self.act: Callable[[], None] = _interrupt
        self._is_armed = False

    def arm(self, after_s: float) -> None:
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def disarm(self) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # it would end a process without a handler at its exit

    def ring(self, _: int, __: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            self.act()


_alarm = _Alarm()


def enough(*, seconds: float, operations: int) -> Callable[[Tally], bool]:
    """Tell after so many seconds, or operations where these are given."""
    until_s = time.monotonic() + seconds
    if operations:
        return lambda tally: tally.rounds.total() >= operations
    return lambda _: time.monotonic() >= until_s


def main(address: str, transports: str, seed: str, seconds: str, operations: str) -> int:
    """Do one trial and say how it went: the last line begins with ``ok`` or ``wrong``."""
    sys.setswitchinterval(0.001)  # threads take turns often, so that interrupts meet more of them
    trial = Trial(address, transports=tuple(transports.split(",")), seed=int(seed))
    tally = trial.run(enough(seconds=float(seconds), operations=int(operations)))
    for words in tally.wrong:
        print(words)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(tally.rounds.items()))
    print(f"{'wrong' if tally.wrong else 'ok'}: {counts}; {tally.interrupts} interrupted")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
