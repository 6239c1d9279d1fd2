"""Two tenants of one agent: neither reads, finds or learns of what the other has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import MIB, FabricThread, content, empty, hashes, with_dram

import ostraca
from ostraca import Ack, BlockState, PutState
from ostraca_cli.testing import small_plan

BLOCKS = 16
"""Of each chain."""

BLOCK_BYTES = 128 << 10
LAYOUT = ostraca.Layout("m", "bf16", 16)
CHAINS = 96
"""That a tenant has put, and as many that nobody has."""

TRIES = 3
"""Of which the fastest counts: other programs make some slow."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    plan = with_dram(small_plan(tmp_path / "fabric"), 16 * MIB)
    with FabricThread(plan) as started:
        yield started


@pytest.fixture
def ours(host: FabricThread) -> Iterator[ostraca.Client]:
    with host.connect(tenant="ours") as client:
        yield client


@pytest.fixture
def theirs(host: FabricThread) -> Iterator[ostraca.Client]:
    with host.connect(tenant="theirs") as client:
        yield client


def volume_of(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def put(client: ostraca.Client, seed: int, *, of: int) -> set[PutState]:
    """Put the chain of a number, with the bytes of another."""
    volume = volume_of(client)
    chain = volume.chain(hashes(BLOCKS, seed))
    result = volume.put(chain, source=content(BLOCKS, of, BLOCK_BYTES), deadline_s=20, ack=Ack.COMMITTED)
    return set(result.states)


def test_chains_of_one_name_are_different_blocks_to_different_tenants(
    ours: ostraca.Client, theirs: ostraca.Client
) -> None:
    assert put(ours, 1, of=1) == {PutState.COMMITTED}
    volume = volume_of(theirs)
    chain = volume.chain(hashes(BLOCKS, 1))
    into = empty(BLOCKS, BLOCK_BYTES)
    assert volume.lookup([chain], deadline_s=5).prefix == 0
    assert set(volume.get(chain, into=into, deadline_s=5).states) == {BlockState.MISS}
    assert (into == empty(BLOCKS, BLOCK_BYTES)).all()
    assert set(volume.prefetch(chain, deadline_s=5).states) == {BlockState.MISS}
    assert put(theirs, 1, of=2) == {PutState.COMMITTED}, "a put tells nothing of the other's, too"
    for client, of in ((ours, 1), (theirs, 2)):
        its = volume_of(client)
        assert set(its.get(its.chain(hashes(BLOCKS, 1)), into=into, deadline_s=5).states) == {BlockState.HIT}
        assert (into == content(BLOCKS, of, BLOCK_BYTES)).all()


def test_a_volume_of_another_tenant_can_not_be_opened(ours: ostraca.Client, theirs: ostraca.Client) -> None:
    ours.volume("secret", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    with pytest.raises(ostraca.OstracaError, match="no volume 'secret' of tenant 'theirs'"):
        theirs.volume("secret", LAYOUT, block_bytes=BLOCK_BYTES)


def test_how_long_an_answer_takes_does_not_tell_what_another_tenant_has(
    ours: ostraca.Client, theirs: ostraca.Client
) -> None:
    """The figure is how often a chain that the other tenant has takes longer than one that nobody has.

    0.5 where times tell nothing. Who has the chains finds them, which shows in times that tell nearly
    always.
    """
    for seed in range(CHAINS):
        assert put(ours, seed, of=seed) == {PutState.COMMITTED}
    there, nowhere = range(CHAINS), range(CHAINS, 2 * CHAINS)
    gets = {client: _longer(_get(client), there, nowhere) for client in (ours, theirs)}
    lookups = _longer(_lookup(theirs), there, nowhere)
    print(f"gets: {gets[theirs]:.3f}, of who has them {gets[ours]:.3f}; look-ups: {lookups:.3f}")
    assert gets[ours] > 0.8, "times are measured well enough to see what is there"
    # Of 96 and 96 times that are alike the figure has a deviation of 0.04.
    assert abs(gets[theirs] - 0.5) < 0.2
    assert abs(lookups - 0.5) < 0.2


def _get(client: ostraca.Client) -> Callable[[int], object]:
    volume, into = volume_of(client), empty(BLOCKS, BLOCK_BYTES)
    return lambda seed: volume.get(volume.chain(hashes(BLOCKS, seed)), into=into, deadline_s=5)


def _lookup(client: ostraca.Client) -> Callable[[int], object]:
    volume = volume_of(client)
    return lambda seed: volume.lookup([volume.chain(hashes(BLOCKS, seed))], deadline_s=5)


def _longer(ask: Callable[[int], object], first: Sequence[int], second: Sequence[int]) -> float:
    """Return how often a time of the first is longer than one of the second (Mann and Whitney, 1947)."""
    asked = [(seed, True) for seed in first] + [(seed, False) for seed in second]
    random.Random(1).shuffle(asked)
    times: dict[bool, list[float]] = {True: [], False: []}
    for seed, is_first in asked:
        took_s = []
        for _ in range(TRIES):
            began_s = time.perf_counter()
            ask(seed)
            took_s.append(time.perf_counter() - began_s)
        times[is_first].append(min(took_s))
    longer = np.subtract.outer(times[True], times[False])
    return float((longer > 0).mean() + (longer == 0).mean() / 2)
