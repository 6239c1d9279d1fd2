"""What workers do in these tests: chains of blocks, put at one agent and got at another.

It uses nothing of Ostraca but what ``ostraca`` offers to everyone, as nothing of tests that it needs does:
workers of the release before (``release_before``) do the same with the SDK that they have.

Every operation must end by its deadline, whatever becomes of it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from tests.support.stalls import Stopwatch

from ostraca import Ack, BlockState, ClientSettings, Layout, PutState, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    import ostraca

MIB = 1 << 20
SMALL = ClientSettings(arena_bytes=16 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
LAYOUT = Layout(model="test-model", dtype="bf16", page_tokens=16)
BLOCK_BYTES = 64 << 10
BLOCKS = 2
"""Of each chain: chains are short, so that many shards have some."""

CHAINS = range(24)
AGAIN_S = 0.25
"""Between two rounds of new chains: faster rounds fill the drives of a test, and evict its older chains."""

LATE_S = 0.5
"""How long after its deadline an operation may end: far less than whatever waits for a network takes."""

_NEW = itertools.count(1_000_000)


def volume_of(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def hashes(seed: int) -> list[bytes]:
    """Make the engine hashes of a chain, which come from its number alone."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(BLOCKS)]


@lru_cache(maxsize=256)  # 32 MiB; chains are got over and over
def content(seed: int) -> NDArray[np.uint8]:
    """Make a chain's blocks, which come from its number alone: shape (BLOCKS, BLOCK_BYTES), read-only."""
    words = np.random.default_rng(seed + 1000).integers(0, 1 << 64, (BLOCKS, BLOCK_BYTES // 8), np.uint64)
    words.flags.writeable = False
    return words.view(np.uint8)


def empty() -> NDArray[np.uint8]:
    """Make room for a chain's blocks."""
    return np.full((BLOCKS, BLOCK_BYTES), 0xEE, np.uint8)


def put(client: ostraca.Client, chains: Iterable[int] = CHAINS, *, deadline_s: float = 5.0) -> list[int]:
    """Put chains, each by its number; return those that are whole and committed."""
    volume, done = volume_of(client), []
    for seed in chains:
        chain, source = volume.chain(hashes(seed)), content(seed)
        with in_time(deadline_s):
            result = volume.put(chain, source=source, deadline_s=deadline_s, ack=Ack.COMMITTED)
        if all(state in (PutState.COMMITTED, PutState.EXISTS) for state in result.states):
            done.append(seed)
    return done


def put_all(client: ostraca.Client, chains: Iterable[int] = CHAINS, *, within_s: float = 30.0) -> None:
    """Put chains until each is whole and committed.

    An owner may decline a put while a busy machine starts the pod; a worker tries such a chain again.
    """
    left, began_s = list(chains), time.monotonic()
    while True:
        done = put(client, left)
        if not (left := [seed for seed in left if seed not in done]):
            return
        assert time.monotonic() - began_s < within_s, f"still declined: {left}, {declined(client, left)}"
        time.sleep(AGAIN_S)


def declined(
    client: ostraca.Client, chains: Iterable[int], *, deadline_s: float = 2.0
) -> Counter[Reason | None]:
    """Put chains, and return why blocks were declined; None counts those that were not."""
    volume = volume_of(client)
    reasons: Counter[Reason | None] = Counter()
    for seed in chains:
        chain, source = volume.chain(hashes(seed)), content(seed)
        with in_time(deadline_s):
            result = volume.put(chain, source=source, deadline_s=deadline_s, ack=Ack.COMMITTED)
        reasons.update(
            reason if state is PutState.DECLINED else None
            for state, reason in zip(result.states, result.reasons, strict=True)
        )
    return reasons


def await_puts(client: ostraca.Client, *, within_s: float = 30.0) -> float:
    """Put new chains until all of some go through; return how long that took."""
    began_s = time.monotonic()
    while set(reasons := declined(client, itertools.islice(_NEW, len(CHAINS)))) != {None}:
        assert time.monotonic() - began_s < within_s, f"puts are still declined: {reasons}"
        time.sleep(AGAIN_S)
    return time.monotonic() - began_s


def missing(
    client: ostraca.Client,
    chains: Iterable[int] = CHAINS,
    *,
    deadline_s: float = 2.0,
    reasons: Counter[Reason | None] | None = None,
) -> list[int]:
    """Get chains; return those that are not whole, and count in *reasons* why.

    A wrong byte fails the test.
    """
    volume, gone = volume_of(client), []
    for seed in chains:
        chain, into = volume.chain(hashes(seed)), empty()
        with in_time(deadline_s):
            result = volume.get(chain, into=into, deadline_s=deadline_s)
        expected = content(seed)
        for number, state in enumerate(result.states):
            if state is BlockState.HIT:
                assert np.array_equal(into[number], expected[number]), (
                    f"chain {seed}, block {number}: wrong bytes"
                )
        if any(state is not BlockState.HIT for state in result.states):
            gone.append(seed)
            if reasons is not None:
                reasons.update(result.reasons)
    return gone


def not_found(
    client: ostraca.Client, chains: Iterable[int] = CHAINS, *, deadline_s: float = 2.0
) -> list[int]:
    """Look chains up, and ask that they be kept for a second; return those that are not there whole."""
    volume = volume_of(client)
    return [
        seed
        for seed in chains
        if volume.lookup(volume.chain(hashes(seed)), deadline_s=deadline_s, pin_s=1.0).prefix < BLOCKS
    ]


@contextmanager
def in_time(deadline_s: float) -> Iterator[None]:
    """Fail the test when an operation ends late, and the machine has not kept it waiting for a processor."""
    watch = Stopwatch()
    yield
    assert watch.took_s < deadline_s + LATE_S, f"took {watch.took_s:.3f} s, and had {deadline_s} s"
