"""What befalls a pod, and what must be so after it. Each begins with a pod in which nobody has started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from tests.simulation.scale.pod import Pod

from ostraca_dpu_agent.controller.plan import FAIR_SHARE_MAX
from ostraca_fabric.model.fabric_map import Claim
from ostraca_fabric.model.ids import ShardId, enclosure_of

Scenario: TypeAlias = Callable[[Pod], Coroutine[None, None, None]]

SOON_S = 10.0
UNOWNED_MAX_S = 8.0
"""A lease, and the patience of one agent that waits for another."""

CLAIMS_MAX = 16
"""Of one shard, by all agents together, in one scenario. Where its owner dies and comes back three times,
several ask for it each time: 9 where 24 agents have 224."""

REST_S = 30.0
"""For so long nothing must change once all has come to rest."""


async def all_start_together(pod: Pod) -> None:
    """Who joins first sees fewer others, and may claim more than its share for a while."""
    await have_started(pod)
    await stays_at_rest(pod)


async def some_join_late(pod: Pod) -> None:
    late = some(pod)
    for number in range(pod.size.agents - late):
        pod.start(f"a{number:02}")
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    for number in range(pod.size.agents - late, pod.size.agents):
        pod.start(f"a{number:02}")
    await comes_to_rest(pod)
    nothing_bounced(pod)


async def one_leaves_in_order(pod: Pod) -> None:
    before = await have_started(pod)
    await pod.end_agent("a00")
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    await comes_to_rest(pod)
    kept(pod, {shard: claim for shard, claim in before.items() if claim.agent != "a00"})
    nothing_bounced(pod)


async def some_die(pod: Pod) -> None:
    before = await have_started(pod)
    dead = [f"a{number:02}" for number in range(some(pod))]
    for name in dead:
        pod.crash(name)
    await asyncio.sleep(pod.store.lease_ttl_s + 1.0)
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    await comes_to_rest(pod)
    kept(pod, {shard: claim for shard, claim in before.items() if claim.agent not in dead})
    nothing_bounced(pod)


async def some_flap(pod: Pod) -> None:
    """They die and come back by turns: some before anybody has heard of it, some long after."""
    await have_started(pod)
    flapping = [f"a{number:02}" for number in range(1 + some(pod))]
    for turn, away_s in enumerate((2.0, 4.0, 8.0, 2.0, 12.0, 1.0)):
        for name in flapping[turn % 2 :: 2]:
            pod.crash(name)
        await asyncio.sleep(away_s)
        for name in flapping[turn % 2 :: 2]:
            pod.start(name)
        await asyncio.sleep(3.0)
    await comes_to_rest(pod)
    nothing_bounced(pod)


async def an_enclosure_is_added_and_drained(pod: Pod) -> None:
    before = await have_started(pod)
    pod.put([pod.made_enclosure("e99")])
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    await comes_to_rest(pod)
    kept(pod, before)
    before = dict(pod.map.claims)
    pod.drain_enclosure("e99")
    await stays_at_rest(pod)  # what is drained is read on
    kept(pod, before)


async def an_enclosure_is_lost_and_comes_back(pod: Pod) -> None:
    before = await have_started(pod)
    others = {shard: claim for shard, claim in before.items() if enclosure_of(shard) != "e00"}
    lost_s = pod.loop.now_s
    pod.lose_enclosure("e00")
    await asyncio.sleep(REST_S)
    kept(pod, others)
    assert not others.keys() & set(pod.unserved())
    pod.lose_enclosure("e00", is_lost=False)
    await comes_to_rest(pod)
    kept(pod, others)
    assert pod.calls_per_s(lost_s) <= calls_max(pod)


async def the_store_goes_away_for_a_minute(pod: Pod) -> None:
    before = await have_started(pod)
    pod.store.go_down()
    await asyncio.sleep(60.0)
    assert pod.map.claims == before
    back_s = pod.loop.now_s
    pod.store.go_up()
    await asyncio.sleep(SOON_S)
    kept(pod, before)
    await stays_at_rest(pod)
    assert pod.calls_per_s(back_s) <= calls_max(pod)


async def have_started(pod: Pod) -> dict[ShardId, Claim]:
    """Start every agent, wait until all is at rest, and return the claims."""
    pod.start_all()
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    await pod.until(lambda: is_at_rest(pod), within_s=60.0)
    pod.forget_owners()
    return dict(pod.map.claims)


async def comes_to_rest(pod: Pod) -> None:
    await pod.until(lambda: is_at_rest(pod), within_s=300.0)
    await stays_at_rest(pod)


async def stays_at_rest(pod: Pod) -> None:
    """See that nothing changes that need not."""
    before = dict(pod.map.claims)
    await asyncio.sleep(REST_S)
    kept(pod, before)
    assert is_at_rest(pod), pod.state()
    assert pod.handing_over_most <= 1, "an agent hands over one shard at a time"


def some(pod: Pod) -> int:
    """Return how many agents are some of them."""
    return max(1, pod.size.agents // 8)


def calls_max(pod: Pod) -> int:
    """Return what the store is asked in a second at most: four times for each shard, and for each agent."""
    return 4 * (len(pod.map.shards()) + len(pod.map.agents))


def is_at_rest(pod: Pod) -> bool:
    """Say whether those that live, and no others, are in the fabric.

    Every shard is answered for by its owner, which is one of them and alone would hand out its space;
    and nobody owns more than has room.
    """
    if {agent.id: agent.start for agent in pod.agents.values()} != {
        agent.id: agent.start for agent in pod.map.agents.values()
    }:
        return False
    even = len(pod.map.shards()) / len(pod.map.agents)
    room = max(math.ceil(even), math.floor(FAIR_SHARE_MAX * even))
    if pod.unserved() or max(pod.owned().values()) > room:
        return False
    writers = pod.writers()
    return all(writers[shard.id] == 1 for shard in pod.map.shards())


def kept(pod: Pod, claims: dict[ShardId, Claim]) -> None:
    """Assert that these claims stand."""
    moved = {shard for shard, claim in claims.items() if pod.map.claims.get(shard) != claim}
    assert not moved, f"{len(moved)} of {len(claims)} shards changed hands, as {min(moved)}"


def nothing_bounced(pod: Pod) -> None:
    assert max(pod.unowned_s.values(), default=0.0) <= UNOWNED_MAX_S
    assert max(pod.claims_asked.values()) <= CLAIMS_MAX


SCENARIOS: tuple[Scenario, ...] = (
    all_start_together,
    some_join_late,
    one_leaves_in_order,
    some_die,
    some_flap,
    an_enclosure_is_added_and_drained,
    an_enclosure_is_lost_and_comes_back,
    the_store_goes_away_for_a_minute,
)
