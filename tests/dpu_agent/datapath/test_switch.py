"""A volume's switch: off, nothing is done for it; shadow, all is done but handing over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.agent.assembly import (
    FAR_S,
    SETTINGS,
    SLOT_BYTES,
    TENANT,
    Assembly,
    assembled,
    beside,
    chain_of,
    content_of,
    get_states,
    put_states,
    reasons_of,
    until,
    with_cache,
)
from tests.support.invariants import evict_all

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.telemetry.explain import BlockExplanation, verdict
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Explain,
    Failure,
    GetDone,
    Lookup,
    LookupDone,
    OwnerNotice,
    Prefetch,
    PrefetchDone,
    PrefetchFor,
    PutDone,
)

DECLINED = BlockState.DECLINED
Done = GetDone | LookupDone | PrefetchDone | PutDone


class Unasked:
    """In the place of an owner: remembers what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def answer(self, request: AgentRequest) -> AnswerToAgent:
        self.asked.append(request)
        return Failure(request.request, "internal", "nobody was to ask")

    def notice(self, notice: OwnerNotice) -> None:
        self.asked.append(notice)


def turn(fabric: Assembly, switch: Switch, *, volume: str = "v") -> None:
    fabric.membership.rule(Overrides(switches={(TENANT, volume): switch}))


def outcomes(done: Done) -> set[tuple[int, Reason]]:
    return {(state, Reason(why)) for state, why in zip(done.states, done.reasons, strict=True)}


async def lookup(fabric: Assembly, numbers: Sequence[int], *, pin_s: float = 0.0) -> LookupDone:
    fabric.requests += 1
    request = Lookup(fabric.requests, 0, FAR_S, chain_of(numbers), pin_s)
    return await fabric.data_path.lookup(fabric.worker(), fabric.volume, request)


async def prefetch(fabric: Assembly, numbers: Sequence[int], *, at: str = "") -> PrefetchDone:
    fabric.requests += 1
    request = Prefetch(fabric.requests, 0, FAR_S, chain_of(numbers), at)
    return await fabric.data_path.prefetch(fabric.worker(), fabric.volume, request)


def counted(fabric: Assembly, operation: str) -> dict[tuple[str, str], int]:
    """Return the counted outcomes of an operation's blocks."""
    tallies = {tally.operation: tally for tally in fabric.context.counters.operations()}
    blocks = tallies[operation].blocks if operation in tallies else ()
    return {(count.state, count.reason): count.blocks for count in blocks}


async def test_a_volume_that_is_off_is_declined_at_once_and_costs_neither_owners_nor_flash() -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, range(4))) == [PutState.COMMITTED] * 4
        turn(fabric, Switch.OFF)
        fabric.drive.holds_reads = fabric.drive.holds_writes = True
        owner = Unasked()
        fabric.ask_by_message()
        fabric.owners.register(fabric.agent.id, owner)
        moved = len(worker.arena.moved)
        for done in (
            await fabric.get(worker, range(6)),
            await lookup(fabric, range(6)),
            await lookup(fabric, range(6), pin_s=1.0),
            await prefetch(fabric, range(6)),
            await prefetch(fabric, range(6), at="agent-1"),
            await fabric.put(worker, range(6, 9)),
        ):
            state = PutState.DECLINED if isinstance(done, PutDone) else DECLINED
            assert outcomes(done) == {(state, Reason.SWITCHED_OFF)}
        fabric.data_path.end_session(fabric.volume, chain_of(range(4)))
        assert len(worker.arena.moved) == moved
        assert (owner.asked, fabric.drive.held) == ([], [])
        fabric.owners.register(fabric.agent.id, fabric.agent._dispatcher)
        fabric.drive.let_go()
        await fabric.at_rest()
        assert counted(fabric, "get") == {("DECLINED", "SWITCHED_OFF"): 6}
        assert counted(fabric, "put")[("DECLINED", "SWITCHED_OFF")] == 3


async def test_a_switch_holds_from_the_next_request_on_for_handles_opened_before() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        await fabric.put(worker, range(4))
        for switch, states in (
            (Switch.OFF, [DECLINED] * 4),
            (Switch.ON, [BlockState.HIT] * 4),
            (Switch.OFF, [DECLINED] * 4),
        ):
            turn(fabric, switch)
            assert get_states(await fabric.get(worker, range(4))) == states
        turn(fabric, Switch.OFF, volume="w")
        assert get_states(await fabric.get(worker, range(4))) == [BlockState.HIT] * 4, "another volume is off"


async def test_what_is_under_way_when_a_volume_is_switched_off_may_end() -> None:
    async with assembled() as fabric:
        worker, reader = fabric.worker(), fabric.worker()
        await fabric.put(worker, range(2))
        fabric.drive.holds_reads = True
        getting = asyncio.create_task(fabric.get(reader, range(2)))
        await until(lambda: bool(fabric.drive.held))
        turn(fabric, Switch.OFF)
        fabric.drive.let_go()
        assert get_states(await getting) == [BlockState.HIT] * 2


async def test_a_prefetch_that_comes_through_another_agent_is_declined_where_it_arrives() -> None:
    async with assembled() as fabric, beside(fabric, with_cache(2 * MIB)) as other:
        await fabric.put(fabric.worker(), range(4))
        turn(fabric, Switch.OFF)
        asked = PrefetchFor(7, FAR_S, TENANT, "v", 1, chain_of(range(4)))
        answer = await fabric.owners.ask(AgentId("agent-1"), asked)
        assert isinstance(answer, PrefetchDone)
        assert outcomes(answer) == {(DECLINED, Reason.SWITCHED_OFF)}
        assert len(other._staging.cache) == 0


@pytest.mark.parametrize("cache_bytes", [0, 4 * MIB])
async def test_a_get_in_the_shadow_reads_and_verifies_and_hands_nothing_over(cache_bytes: int) -> None:
    async with assembled(with_cache(cache_bytes)) as fabric:
        worker, reader = fabric.worker(), fabric.worker()
        turn(fabric, Switch.SHADOW)
        assert put_states(await fabric.put(worker, range(8))) == [PutState.COMMITTED] * 8, "it fills"
        evict_all(fabric.context.staging.cache)
        if not cache_bytes:
            for damaged_block in (3, 5):
                fabric.drive.flip_bit(fabric.drive.bytes.find(content_of(damaged_block)[:64]) + 100)
        done = await fabric.get(reader, range(10))
        assert outcomes(done) == {(DECLINED, Reason.SHADOWED)}
        assert (done.positions, done.tags, done.unsettled) == (b"", b"", b"")
        await fabric.at_rest()
        assert (reader.arena.moved, reader.said) == ([], [])
        assert not any(reader.arena.bytes)
        damaged = {("MISS", "DAMAGED"): 2} if not cache_bytes else {}
        assert counted(fabric, "shadow_get") == {
            ("HIT", "NONE"): 8 - sum(damaged.values()),
            ("MISS", "NOT_FOUND"): 2,
            **damaged,
        }
        assert counted(fabric, "get") == {("DECLINED", "SHADOWED"): 10}
        counters = fabric.context.counters
        assert (counters.snapshot().get_hits_from_cache, sum(counters.hits_on.values())) == (0, 0)
        assert counters.damaged == sum(damaged.values())


async def test_who_is_in_the_shadow_does_not_wait_and_what_is_late_is_counted_as_late() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(4))
        turn(fabric, Switch.SHADOW)
        fabric.drive.holds_reads = True
        async with asyncio.timeout(1):
            done = await fabric.get(fabric.worker(), range(4), deadline_s=0.05)
        assert outcomes(done) == {(DECLINED, Reason.SHADOWED)}
        await until(lambda: counted(fabric, "shadow_get") == {("LATE", "DEADLINE"): 4})
        assert fabric.context.staging.quarantined_bytes == 4 * SLOT_BYTES, "flash may still write there"
        fabric.drive.let_go()
        await fabric.at_rest()


async def test_look_ups_in_the_shadow_find_out_and_do_not_tell() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(4))
        turn(fabric, Switch.SHADOW)
        assert outcomes(await lookup(fabric, range(6))) == {(DECLINED, Reason.SHADOWED)}
        await fabric.at_rest()
        assert counted(fabric, "shadow_lookup") == {("HIT", "NONE"): 4, ("MISS", "NOT_FOUND"): 2}
        assert counted(fabric, "lookup") == {("DECLINED", "SHADOWED"): 6}


async def test_no_more_is_tried_out_at_once_than_requests_may_be_under_way() -> None:
    async with assembled(replace(SETTINGS, flow=replace(SETTINGS.flow, requests_max=3))) as fabric:
        await fabric.put(fabric.worker(), range(2))
        turn(fabric, Switch.SHADOW)
        fabric.drive.holds_reads = True
        for _ in range(4):
            assert outcomes(await fabric.get(fabric.worker(), [0])) == {(DECLINED, Reason.SHADOWED)}
        assert counted(fabric, "shadow_get") == {("DECLINED", "OVERLOADED"): 1}
        turn(fabric, Switch.ON)
        fabric.drive.let_go()
        assert get_states(await fabric.get(fabric.worker(), [0])) == [BlockState.HIT]
        await fabric.at_rest()


async def test_an_agent_that_stops_begins_nothing_more_of_what_is_tried_out() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(24))
        turn(fabric, Switch.SHADOW)
        fabric.drive.holds_reads = True
        await fabric.get(fabric.worker(), range(24))
        await until(lambda: len(fabric.drive.held) == 2)
        stopping = asyncio.create_task(fabric.agent.drain())
        await until(lambda: counted(fabric, "shadow_get") == {("LATE", "CANCELLED"): 24})
        held = list(fabric.drive.held)
        assert len(held) == 2
        fabric.drive.let_go()
        assert await stopping
        await fabric.at_rest()


@pytest.mark.parametrize(
    ("switch", "says"),
    [
        (Switch.OFF, "It can't be got: its volume is switched off."),
        (Switch.SHADOW, "It can't be got: its volume is in shadow mode"),
        (Switch.ON, "It can be got now, from flash"),
    ],
)
async def test_an_explanation_says_how_the_volume_is_switched(switch: Switch, says: str) -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), [0])
        turn(fabric, switch)
        await fabric.get(fabric.worker(), [0])
        await fabric.at_rest()
        asked = Explain(0, FAR_S, "v", chain_of([0]))
        found = read_body((await fabric.data_path.explain(fabric.volume, asked)).body, BlockExplanation)
        assert verdict(found).startswith(says)
        told = [(event.kind, event.state, event.reason) for event in found.events]
        assert (("SHADOWED", "HIT", "") in told) == (switch is Switch.SHADOW)
        assert (
            reasons_of(await fabric.get(fabric.worker(), [0]))[0].name
            in {
                Switch.OFF: "SWITCHED_OFF",
                Switch.SHADOW: "SHADOWED",
                Switch.ON: "NONE",
            }[switch]
        )
