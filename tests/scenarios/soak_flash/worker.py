"""The worker of a soak: it outlives the fabric, and everything it is told goes into the ledger.

Its clients are the same through all outages, so that each is also a test of finding an agent again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from tests.scenarios.soak_flash.content import BLOCK_BYTES, NEVER_PUT, content, hash_of, length_of
from tests.scenarios.soak_flash.ledger import Ledger
from tests.scenarios.soak_flash.life import StartError

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca.settings import ClientSettings

MIB = 1 << 20
VOLUME = "soak-flash"
LAYOUT = ostraca.Layout(model="soak-flash", dtype="bf16", page_tokens=16)
SETTINGS = ClientSettings(arena_bytes=48 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
THREADS = 2
BATCH_MAX = 16
RECENT = 1_500
"""Blocks put again, got and looked up are mostly among so many of the last."""

POISON = 0xEE
DEADLINE_S = 5.0
PAUSE_S = 0.005
CHECK_BATCH = 64
LOOK_UP_BATCH = 256
BACK_S = 30.0
"""A fabric that is ready must serve this worker again within it, and know all its blocks."""

_GONE = {Reason.DISCONNECTED, Reason.NO_OWNER, Reason.RECOVERING, Reason.DEADLINE}
"""Reasons that say nothing of a block, only of the fabric."""


class Worker:
    """Clients, and threads that use them between ``go`` and ``rest``."""

    def __init__(
        self,
        ways: Sequence[str | Sequence[str]],
        ledger: Ledger,
        *,
        seed: int,
        credentials: str | None = None,
        rest_s: float = 0.0,
    ) -> None:
        """Have a client for each of *ways*, which are addresses of agents.

        Take a rest of *rest_s* after each operation.
        """
        self.puts_under_way = 0
        self.outcomes: Counter[str] = Counter()
        self._ledger = ledger
        self._seed = seed
        self._turn = 0
        self._next = 0
        self._rest_s = rest_s
        self._clients = [
            ostraca.connect(way, settings=SETTINGS, timeout_s=BACK_S, credentials=credentials) for way in ways
        ]
        self._volumes = [
            client.volume(VOLUME, LAYOUT, block_bytes=BLOCK_BYTES, create=True) for client in self._clients
        ]
        self.volume = self._volumes[0]
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._crashes: list[BaseException] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()
        for client in self._clients:
            client.close()

    @property
    def put_ever(self) -> range:
        """The numbers of all blocks that a put was begun of."""
        return range(self._next)

    def go(self) -> None:
        """Begin to use the fabric."""
        self._turn += 1
        self._is_over.clear()
        self._threads = [
            threading.Thread(target=self._work, args=(volume, (self._seed, self._turn, number)))
            for number, volume in zip(range(THREADS), itertools.cycle(self._volumes), strict=False)
        ]
        for thread in self._threads:
            thread.start()

    def rest(self) -> None:
        """Stop using it; returns when every operation has ended, and raises what a thread met."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._crashes:
            raise self._crashes[0]

    def come_back(self, *, is_seen: bool = True) -> float:
        """Wait until the fabric, just started, answers for every block that flash listed.

        Check what it says, where *is_seen*: flash was seen since it was used last.

        Return how long it took to answer for all. Raises StartError when it does not.
        """
        begun_s = time.monotonic()
        listed = sorted(self._ledger.listed)
        for first in range(0, max(1, len(listed)), CHECK_BATCH):
            batch = listed[first : first + CHECK_BATCH] or [NEVER_PUT]
            result = self._answered(batch, begun_s + BACK_S)
            for number, state, reason in zip(batch, result.states, result.reasons, strict=True):
                if is_seen and state != BlockState.HIT and number in self._ledger.listed:
                    self._ledger.missed_after_start(number, f"{state.name} {reason.name}")
        took_s = time.monotonic() - begun_s
        never = [NEVER_PUT + self._turn * CHECK_BATCH + n for n in range(CHECK_BATCH)]
        self._lookup(self.volume, never)
        return took_s

    def get_all(self, numbers: Sequence[int]) -> None:
        """Get these blocks, and check them."""
        for first in range(0, len(numbers), BATCH_MAX):
            self._get(self.volume, numbers[first : first + BATCH_MAX])

    def look_up_all(self) -> None:
        """Look up, by each client, all blocks that are committed for sure, or evicted."""
        numbers = sorted(self._sure(self.put_ever))
        for volume in self._volumes:
            for first in range(0, len(numbers), LOOK_UP_BATCH):
                self._lookup(volume, numbers[first : first + LOOK_UP_BATCH])

    def _answered(self, batch: list[int], until_s: float) -> Any:
        """Look up until nothing but the blocks decides the answer."""
        while True:
            result = self.volume.lookup(_chain(self.volume, batch), deadline_s=1.0)
            is_sure = [
                state == BlockState.HIT or (state == BlockState.MISS and reason not in _GONE)
                for state, reason in zip(result.states, result.reasons, strict=True)
            ]
            if all(is_sure):
                return result
            if time.monotonic() > until_s:
                message = f"the fabric does not serve again: {result}"
                raise StartError(message)
            time.sleep(0.002)

    def _work(self, volume: ostraca.Volume, seed: tuple[int, ...]) -> None:
        dice = np.random.default_rng(seed)
        try:
            while not self._is_over.wait(self._rest_s):
                self._step(volume, dice)
        except BaseException as crash:  # noqa: BLE001 (raised by ``rest``)
            self._crashes.append(crash)

    def _step(self, volume: ostraca.Volume, dice: np.random.Generator) -> None:
        count = int(dice.integers(1, BATCH_MAX + 1))
        draw = dice.random()
        if draw < 0.5:
            self._put(volume, self._new(count), Ack.COMMITTED if dice.random() < 0.6 else Ack.STAGED)
        elif draw < 0.65:
            self._put(volume, self._old(dice, count), Ack.COMMITTED)
        elif draw < 0.9:
            self._get(volume, self._old(dice, count))
        else:
            never = NEVER_PUT + int(dice.integers(NEVER_PUT))
            self._lookup(volume, [*self._old(dice, count), never])

    def _new(self, count: int) -> list[int]:
        with self._lock:
            first, self._next = self._next, self._next + count
        return list(range(first, first + count))

    def _old(self, dice: np.random.Generator, count: int) -> list[int]:
        end = max(1, self._next)
        begin = max(0, end - RECENT) if dice.random() < 0.9 else 0
        return sorted(set(dice.integers(begin, end, count).tolist()))

    def _put(self, volume: ostraca.Volume, numbers: list[int], ack: Ack) -> None:
        source = [content(number) for number in numbers]
        with self._lock:
            self._next = max(self._next, numbers[-1] + 1)
            self._ledger.trying(numbers)
            self.puts_under_way += 1
        try:
            result = volume.put(_chain(volume, numbers), source=source, deadline_s=DEADLINE_S, ack=ack)
        finally:
            with self._lock:
                self.puts_under_way -= 1
        existing = []
        with self._lock:
            for number, state in zip(numbers, result.states, strict=True):
                if state == PutState.COMMITTED:
                    self._ledger.committed(number)
                elif state == PutState.EXISTS:
                    self._ledger.existed(number)
                    existing.append(number)
        self._note("put", result)
        if existing:
            self._get(volume, existing)

    def _get(self, volume: ostraca.Volume, numbers: Sequence[int]) -> None:
        into = [np.full(length_of(number), POISON, np.uint8) for number in numbers]
        before = self._sure(numbers)
        result = volume.get(_chain(volume, numbers), into=into, deadline_s=DEADLINE_S)
        for number, state, block in zip(numbers, result.states, into, strict=True):
            wanted = content(number) if state == BlockState.HIT else np.uint8(POISON)
            if not (block == wanted).all():
                self._violated(f"WRONG BYTES: block {number}, {state.name}")
        self._heard(numbers, result, before)
        self._note("get", result)

    def _lookup(self, volume: ostraca.Volume, numbers: Sequence[int]) -> None:
        before = self._sure(numbers)
        result = volume.lookup(_chain(volume, numbers), deadline_s=DEADLINE_S)
        self._heard(numbers, result, before)
        self._note("lookup", result)

    def _sure(self, numbers: Iterable[int]) -> dict[int, int]:
        with self._lock:
            return self._ledger.sure(numbers)

    def _heard(self, numbers: Iterable[int], result: Any, before: dict[int, int]) -> None:
        """Take down what the fabric says of blocks."""
        with self._lock:
            for number, state, reason in zip(numbers, result.states, result.reasons, strict=True):
                if state == BlockState.HIT:
                    self._ledger.found(number)
                elif reason == Reason.NOT_FOUND:
                    self._ledger.missed(number, reason.name, before=before)
                elif reason == Reason.DAMAGED:
                    self._ledger.dropped(number)
                elif (
                    reason == Reason.WRONG_LENGTH
                    and self._ledger.is_strict
                    and number not in self._ledger.damaged
                ):
                    self._ledger.violations.append(f"LOST: block {number} is listed with another length")

    def _violated(self, words: str) -> None:
        with self._lock:
            self._ledger.violations.append(words)

    def _note(self, operation: str, result: Any) -> None:
        """Count what became of blocks; where nobody answers, leave the processor to others for a moment."""
        pairs = zip(result.states, result.reasons, strict=True)
        with self._lock:
            self.outcomes.update(f"{operation} {state.name} {reason.name}" for state, reason in pairs)
        if Reason.DISCONNECTED in result.reasons:
            self._is_over.wait(PAUSE_S)


def _chain(volume: ostraca.Volume, numbers: Iterable[int]) -> ostraca.Chain:
    return volume.chain([hash_of(number) for number in numbers], is_chained=False)
