"""What befalls a pod, and what must be so after it. Each begins with a pod in which nobody has started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from tests.simulation.scale.pod import Pod

Scenario: TypeAlias = Callable[[Pod], Coroutine[None, None, None]]

SOON_S = 10.0
UNOWNED_MAX_S = 8.0
"""A lease, and the patience of one agent that waits for another."""

CLAIMS_MAX = 8
"""Of one shard, by all agents together, in one scenario."""


async def all_start_together(pod: Pod) -> None:
    """Who joins first sees fewer others, and may claim more than its share for a while."""
    pod.start_all()
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    await pod.until(lambda: has_settled(pod), within_s=60.0)


async def some_join_late(pod: Pod) -> None:
    late = max(1, pod.size.agents // 8)
    for number in range(pod.size.agents - late):
        pod.start(f"a{number:02}")
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    for number in range(pod.size.agents - late, pod.size.agents):
        pod.start(f"a{number:02}")
    await pod.until(lambda: has_settled(pod), within_s=300.0)
    is_even(pod)
    nothing_bounced(pod)


async def one_leaves_in_order(pod: Pod) -> None:
    await all_start_together(pod)
    pod.forget_owners()
    await pod.end_agent("a00")
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    is_even(pod)
    nothing_bounced(pod)


async def some_die(pod: Pod) -> None:
    await all_start_together(pod)
    pod.forget_owners()
    for number in range(max(1, pod.size.agents // 8)):
        pod.crash(f"a{number:02}")
    await asyncio.sleep(pod.store.lease_ttl_s + 1.0)
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    is_even(pod)
    nothing_bounced(pod)


async def one_flaps(pod: Pod) -> None:
    await all_start_together(pod)
    pod.forget_owners()
    for _ in range(4):
        pod.crash("a00")
        await asyncio.sleep(2.0)
        pod.start("a00")
        await asyncio.sleep(3.0)
    await pod.until(lambda: has_settled(pod), within_s=300.0)
    nothing_bounced(pod)


async def an_enclosure_is_added_drained_and_lost(pod: Pod) -> None:
    await all_start_together(pod)
    pod.put([pod.made_enclosure("e99")])
    await pod.until(lambda: not pod.unserved(), within_s=SOON_S)
    is_even(pod)
    pod.drain_enclosure("e99")
    await asyncio.sleep(2.0)
    assert not pod.unserved(), "what is drained is read on"
    pod.forget_owners()
    calls_since_s = pod.loop.now_s
    pod.lose_enclosure("e00")
    await asyncio.sleep(10.0)
    assert pod.calls_per_s(calls_since_s) <= calls_max(pod)


async def the_store_goes_away_for_a_minute(pod: Pod) -> None:
    await all_start_together(pod)
    pod.forget_owners()
    before = dict(pod.map.claims)
    pod.store.go_down()
    await asyncio.sleep(60.0)
    assert pod.map.claims == before
    back_s = pod.loop.now_s
    pod.store.go_up()
    await asyncio.sleep(SOON_S)
    assert pod.map.claims == before, "nobody lost anything"
    assert pod.calls_per_s(back_s) <= calls_max(pod)


def calls_max(pod: Pod) -> int:
    """Return what the store is asked in a second at most: four times for each shard, and for each agent."""
    return 4 * (len(pod.map.shards()) + len(pod.map.agents))


def is_even(pod: Pod) -> None:
    owned = pod.owned()
    share = len(pod.map.shards()) / len(owned)
    assert max(owned.values()) <= math.ceil(1.25 * share) + 1, owned


def has_settled(pod: Pod) -> bool:
    owned = pod.owned()
    room = math.ceil(1.25 * len(pod.map.shards()) / len(owned))
    return not pod.unserved() and max(owned.values()) <= room


def nothing_bounced(pod: Pod) -> None:
    assert max(pod.unowned_s.values(), default=0.0) <= UNOWNED_MAX_S
    assert max(pod.claims_asked.values()) <= CLAIMS_MAX


SCENARIOS: tuple[Scenario, ...] = (
    all_start_together,
    some_join_late,
    one_leaves_in_order,
    some_die,
    one_flaps,
    an_enclosure_is_added_drained_and_lost,
    the_store_goes_away_for_a_minute,
)
