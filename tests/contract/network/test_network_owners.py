"""What befalls connections between agents, and what who asks sees of it. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field

import pytest
from tests.contract.conftest import VIRTUAL
from tests.contract.network.owners_contract import FAR_S, OWNER, SHARD, Owner, Serving
from tests.support.simulated.simulated_network import SimulatedNetwork

from ostraca_dpu_agent.adapters.peers.loopback_owners import LoopbackOwners
from ostraca_dpu_agent.adapters.peers.owners import NetworkOwners
from ostraca_dpu_agent.adapters.peers.peer_connection import PeerSettings
from ostraca_fabric.connection import Server, serve
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.model.ids import AgentId, StartId
from ostraca_fabric.runtime.tasks import begun
from ostraca_fabric.telemetry.status import AskCounters, PeerStatus
from ostraca_fabric.wire.handshake import Access, AgentHandshake
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Commit,
    Committed,
    ConnectionLimits,
    Failure,
    Inspect,
    Release,
    Reserve,
    Resolve,
    Resolved,
    RingProgressQuery,
)

INFLIGHT_MAX = 4
SETTINGS = PeerSettings(waiting_max=5)
ADDRESS = "tcp://a:7400"
RESOLVE = Resolve(0, FAR_S, 1.0, ())


@dataclass
class Pair:
    """Host b asks the owner on host a."""

    network: SimulatedNetwork
    owner: Owner
    owners: NetworkOwners
    addresses: dict[AgentId, tuple[str, ...]]
    tokens: list[str]
    servers: list[Server] = field(default_factory=list)
    serving: Serving = field(init=False)

    async def serve(self, name: AgentId = OWNER) -> None:
        self.serving = Serving(self.owner)
        access = Access(own_uid=0, fabric_tokens=("t",))
        limits = ConnectionLimits(1 << 16, 512, INFLIGHT_MAX)
        handshake = AgentHandshake(name, StartId(bytes(16)), access, limits)
        server = await serve(ADDRESS, self.serving, handshake, network=self.network.host("a"))
        self.servers.append(server)

    @property
    def status(self) -> PeerStatus:
        (status,) = self.owners.peers()
        return status

    async def fails(self, request: AgentRequest = RESOLVE, *, match: str | None = None) -> float:
        """Ask; return how long it took to hear that the owner can't be reached."""
        began_s = now_s()
        with pytest.raises(ConnectError, match=match):
            await self.owners.ask(OWNER, request)
        return now_s() - began_s

    async def until_held_off(self, request: AgentRequest = RESOLVE) -> None:
        async with asyncio.timeout(FAR_S):
            while not any(peer.is_held_off for peer in self.owners.peers()):
                with pytest.raises((ConnectError, TimeoutError)):
                    await self.owners.ask(OWNER, request)
                await asyncio.sleep(0.01)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    network = SimulatedNetwork(1)
    addresses: dict[AgentId, tuple[str, ...]] = {OWNER: (ADDRESS,)}
    tokens = ["t"]
    owners = NetworkOwners(
        AgentId("asker"),
        here=LoopbackOwners(),
        address_of=lambda agent: addresses.get(agent, ()),
        dice=random.Random(1),
        settings=SETTINGS,
        token=lambda: tokens[0],
        network=network.host("b"),
    )
    pair = Pair(network, Owner(), owners, addresses, tokens)
    await pair.serve()
    yield pair
    pair.owner.may_answer.set()
    await owners.close()
    for server in pair.servers:
        assert await server.close()


def now_s() -> float:
    return asyncio.get_running_loop().time()


class TestNetworkOwners:
    loop_factories = VIRTUAL

    async def test_all_requests_share_one_connection_and_nobody_waits_for_another(self, pair: Pair) -> None:
        answers = [pair.owners.ask(OWNER, RESOLVE) for _ in range(INFLIGHT_MAX - 1)]
        assert all(isinstance(answer, Resolved) for answer in await asyncio.gather(*answers))
        assert len(pair.serving.connections) == 1
        assert pair.status == PeerStatus(
            OWNER, is_connected=True, asks=AskCounters(answered=INFLIGHT_MAX - 1)
        )
        pair.owner.may_answer.clear()
        slow = asyncio.ensure_future(pair.owners.ask(OWNER, Commit(0, FAR_S, ())))
        await pair.owner.until(lambda: len(pair.owner.asked) == INFLIGHT_MAX)
        assert pair.status.inflight == 1
        pair.owner.may_answer.set()
        assert isinstance(await slow, Committed)

    async def test_a_first_part_without_a_task_asks_a_peer_that_is_not_connected(self, pair: Pair) -> None:
        async def look_up() -> AnswerToAgent:
            return await pair.owners.ask(OWNER, RESOLVE)

        begun_here = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: begun_here.set_result([begun(look_up())]))
        (rest,) = await begun_here
        assert isinstance(await rest, Resolved)

    async def test_what_can_be_sent_is_under_way_before_anybody_waits_for_it(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        asked = pair.owners.ask(OWNER, RESOLVE)
        assert not isinstance(asked, Coroutine)
        await pair.owner.until(lambda: len(pair.owner.asked) == 2)
        await asyncio.wait([asked.answered], timeout=FAR_S)
        assert pair.status.inflight == 1, "its slot is taken until somebody has the answer"
        assert isinstance(await asked, Resolved)
        assert pair.status.inflight == 0

    async def test_a_peer_hears_that_nobody_waits_any_more(self, pair: Pair) -> None:
        pair.owner.may_answer.clear()
        with pytest.raises(TimeoutError):
            await pair.owners.ask(OWNER, Commit(0, 0.5, ()))
        (given_up,) = pair.serving.given_up
        await asyncio.wait_for(given_up, FAR_S)

    async def test_this_process_s_own_agents_are_reached_without_a_connection(self, pair: Pair) -> None:
        here = Owner()
        pair.owners.register(AgentId("asker"), here)
        assert isinstance(await pair.owners.ask(AgentId("asker"), RESOLVE), Resolved)
        pair.owners.tell(AgentId("asker"), Release(()))
        assert (len(here.asked), here.heard) == (1, [Release(())])
        assert pair.owners.peers() == ()
        pair.owners.unregister(AgentId("asker"))
        with pytest.raises(ConnectError, match="no address"):
            await pair.owners.ask(AgentId("asker"), RESOLVE)

    async def test_what_the_peer_does_not_take_yet_waits_and_beyond_a_limit_fails(self, pair: Pair) -> None:
        pair.owner.may_answer.clear()
        commits = [Commit(0, FAR_S, ()) for _ in range(INFLIGHT_MAX - 1 + SETTINGS.waiting_max)]
        asking = [asyncio.ensure_future(pair.owners.ask(OWNER, commit)) for commit in commits]
        await pair.owner.until(lambda: len(pair.owner.asked) == INFLIGHT_MAX - 1)
        assert pair.status.waiting == SETTINGS.waiting_max
        answer = await pair.owners.ask(OWNER, RESOLVE)
        assert isinstance(answer, Failure)
        assert answer.code == "overloaded"
        pair.owner.may_answer.set()
        assert all(isinstance(each, Committed) for each in await asyncio.gather(*asking))
        assert pair.status.waiting == pair.status.failures == 0

    async def test_a_request_that_waits_too_long_to_be_sent_is_late_and_nothing_against_the_peer(
        self, pair: Pair
    ) -> None:
        pair.owner.may_answer.clear()
        commits = [Commit(0, FAR_S, ()) for _ in range(INFLIGHT_MAX - 1)]
        asking = [asyncio.ensure_future(pair.owners.ask(OWNER, commit)) for commit in commits]
        await pair.owner.until(lambda: len(pair.owner.asked) == INFLIGHT_MAX - 1)
        with pytest.raises(TimeoutError):
            await pair.owners.ask(OWNER, Resolve(0, 0.5, 1.0, ()))
        assert pair.status.failures == 0
        pair.owner.may_answer.set()
        await asyncio.gather(*asking)

    async def test_requests_are_counted_by_how_they_end(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        pair.owner.answer_with = Failure(0, "overloaded", "busy")
        await pair.owners.ask(OWNER, RESOLVE)
        pair.owner.may_answer.clear()
        with pytest.raises(TimeoutError):
            await pair.owners.ask(OWNER, Commit(0, 0.01, ()))
        given_up = asyncio.ensure_future(pair.owners.ask(OWNER, Commit(0, FAR_S, ())))
        await pair.owner.until(lambda: len(pair.owner.asked) == 4)
        given_up.cancel()
        await asyncio.wait([given_up])
        pair.network.crash("a")
        pair.servers.clear()
        await pair.fails()
        assert pair.status.asks == AskCounters(answered=1, refused=1, late=1, unreachable=1)

    async def test_a_request_longer_than_the_peer_takes_fails_alone(self, pair: Pair) -> None:
        answer = await pair.owners.ask(OWNER, Inspect(0, FAR_S, SHARD, bytes(1 << 16)))
        assert isinstance(answer, Failure)
        assert answer.code == "frame_too_long"
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    async def test_a_peer_that_restarts_is_reached_again_at_once(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        waiting = asyncio.ensure_future(pair.fails(Commit(0, FAR_S, ()), match="is closed"))
        pair.owner.may_answer.clear()
        await pair.owner.until(lambda: len(pair.owner.asked) == 2)
        pair.network.crash("a")
        await waiting
        pair.network.restart("a")
        pair.owner.may_answer.set()
        pair.servers.clear()
        await pair.serve()
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)
        assert pair.status.failures == 0

    async def test_attempts_to_connect_that_fail_are_spaced_out_and_in_between_nobody_waits(
        self, pair: Pair
    ) -> None:
        pair.network.crash("a")
        pair.servers.clear()
        await pair.fails(match="nobody listens")
        assert await pair.fails(match="next attempt to reach agent .* in 0.0") == 0.0
        await asyncio.sleep(SETTINGS.backoff_s)
        await pair.fails(match="nobody listens")
        assert await pair.fails(match="next attempt to reach agent .* in 0.0") == 0.0
        assert pair.status.failures == 2

    async def test_a_peer_that_refuses_is_held_off_and_tried_again_until_it_is_back(self, pair: Pair) -> None:
        pair.network.crash("a")
        pair.servers.clear()
        await pair.until_held_off()
        assert await pair.fails(match="is open.*nobody listens") == 0.0
        assert pair.status.held_off == 1
        pair.network.restart("a")
        await pair.serve()
        await asyncio.sleep(SETTINGS.breaker.open_s)
        assert await pair.fails(match="circuit breaker") == 0.0, "what prompts the trial does not wait for it"
        await asyncio.sleep(0.1)
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)
        assert pair.status == PeerStatus(
            OWNER,
            is_connected=True,
            held_off=1,
            failures=SETTINGS.breaker.failures_max,
            asks=pair.status.asks,
        )

    @pytest.mark.parametrize("is_connected", [True, False])
    async def test_a_host_that_falls_silent_costs_a_second_and_then_nothing(
        self, pair: Pair, *, is_connected: bool
    ) -> None:
        if is_connected:
            await pair.owners.ask(OWNER, RESOLVE)
        pair.network.part("a", "b")
        began_s = now_s()
        asking = [asyncio.ensure_future(pair.fails()) for _ in range(INFLIGHT_MAX - 1)]
        assert max(await asyncio.gather(*asking)) < 1.0, "though they had much longer"
        assert await pair.fails(match="circuit breaker") == 0.0
        pair.network.join("a", "b")
        while pair.status.is_held_off:
            await asyncio.sleep(0.1)
            if pair.status.is_held_off:
                await pair.fails(match="circuit breaker")
        assert now_s() - began_s < 10.0
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    async def test_a_peer_that_stays_away_is_tried_once_a_second_at_most(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        pair.network.crash("a", silently=True)
        pair.servers.clear()
        await pair.until_held_off(Resolve(0, 0.1, 1.0, ()))
        before = pair.status.failures
        until_s = now_s() + 100.0
        while now_s() < until_s:
            await pair.fails(match="circuit breaker")
            await asyncio.sleep(0.05)
        assert 30 <= pair.status.failures - before <= 100

    async def test_slow_commits_are_nothing_against_a_peer_that_answers_pings(self, pair: Pair) -> None:
        pair.owner.may_answer.clear()
        for _ in range(SETTINGS.breaker.failures_max):
            with pytest.raises(TimeoutError):
                await pair.owners.ask(OWNER, Commit(0, 0.3, ()))
            await asyncio.sleep(SETTINGS.patience_s)
        assert (pair.status.failures, pair.status.is_held_off) == (0, False)

    async def test_slow_reservations_of_a_peer_that_does_not_answer_pings_hold_it_off(
        self, pair: Pair
    ) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        pair.network.cut("a", "b")
        for _ in range(SETTINGS.breaker.failures_max):
            with pytest.raises(TimeoutError):
                await pair.owners.ask(OWNER, Reserve(0, 0.3, 1.0, ()))
            await asyncio.sleep(2 * SETTINGS.patience_s)
        assert pair.status.is_held_off
        assert "Ping" in pair.status.why
        pair.network.heal("a", "b")

    async def test_deadlines_too_short_to_be_met_say_nothing(self, pair: Pair) -> None:
        pair.owner.may_answer.clear()
        for _ in range(SETTINGS.breaker.failures_max):
            with pytest.raises(TimeoutError):
                await pair.owners.ask(OWNER, Resolve(0, SETTINGS.deadline_min_s / 2, 1.0, ()))
        assert pair.status.failures == 0

    async def test_another_agent_at_the_address_is_not_asked(self, pair: Pair) -> None:
        assert await pair.servers.pop().close()
        await pair.serve(AgentId("stranger"))
        await pair.fails(match="is agent stranger, not owner")
        assert pair.owner.asked == []

    async def test_addresses_are_tried_in_order_and_looked_up_for_each_attempt(self, pair: Pair) -> None:
        pair.addresses[OWNER] = ("unix:///not/here.sock", ADDRESS)
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    @pytest.mark.parametrize("bad", ["tls://a:7400", "quic://a:7400", "tcp://a"])
    async def test_an_address_that_can_not_be_dialled_from_here_is_one_that_failed(
        self, pair: Pair, bad: str
    ) -> None:
        pair.addresses[OWNER] = (bad,)
        assert await pair.fails() == 0.0, "nobody waits for what has failed"
        assert await pair.fails(match="next attempt to reach agent .* in 0.0") == 0.0
        assert pair.status.failures == 1
        pair.addresses[OWNER] = (bad, ADDRESS)
        await asyncio.sleep(SETTINGS.backoff_s)
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    async def test_nobody_waits_for_an_attempt_to_connect_that_crashed(self, pair: Pair) -> None:
        token = pair.tokens.pop()
        assert await pair.fails(match="crashed") == 0.0
        assert await pair.fails(match="next attempt to reach agent .* in 0.0") == 0.0
        pair.tokens.append(token)
        await asyncio.sleep(SETTINGS.backoff_s)
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    async def test_a_peer_whose_address_could_not_be_dialled_for_a_while_is_found_again(
        self, pair: Pair
    ) -> None:
        pair.addresses[OWNER] = ("quic://a:7400",)
        await pair.until_held_off()
        for _ in range(3):
            await asyncio.sleep(SETTINGS.breaker.open_max_s)
            await pair.fails(match="circuit breaker")
            await asyncio.sleep(0.1)
        pair.addresses[OWNER] = (ADDRESS,)
        await asyncio.sleep(SETTINGS.breaker.open_max_s)
        await pair.fails(match="circuit breaker")
        await asyncio.sleep(0.1)
        assert isinstance(await pair.owners.ask(OWNER, RESOLVE), Resolved)

    @pytest.mark.parametrize("is_lost", [False, True])
    async def test_a_peer_that_was_out_of_reach_for_long_is_asked_again_a_second_after_its_return(
        self, pair: Pair, *, is_lost: bool
    ) -> None:
        async def is_reached() -> bool:
            await asyncio.sleep(0.1)
            with contextlib.suppress(ConnectError, TimeoutError):
                return isinstance(await pair.owners.ask(OWNER, Resolve(0, 0.1, 1.0, ())), Resolved)
            return False

        assert await is_reached()
        pair.network.part("a", "b")
        cut_off_s = now_s()
        while now_s() < cut_off_s + 9.0:
            assert not await is_reached()
        pair.network.join("a", "b", is_lost=is_lost)
        joined_s = now_s()
        while not await is_reached():
            assert now_s() < joined_s + 1.0 + SETTINGS.patience_s

    async def test_a_trial_that_takes_too_long_is_over_and_another_one_follows(self, pair: Pair) -> None:
        pair.network.part("a", "b")
        await pair.until_held_off()
        pair.addresses[OWNER] = (ADDRESS,) * 100  # each of which takes ``handshake_s`` to fail
        await asyncio.sleep(SETTINGS.breaker.open_s)
        before = pair.status.failures
        for _ in range(3):
            await pair.fails(match="circuit breaker")
            await asyncio.sleep(SETTINGS.trial_s + SETTINGS.breaker.open_max_s)
        assert pair.status.failures - before >= 3

    async def test_that_a_peer_is_held_off_is_said_once(self, pair: Pair) -> None:
        pair.network.crash("a")
        pair.servers.clear()
        await pair.until_held_off()
        await asyncio.sleep(SETTINGS.breaker.open_max_s)
        await pair.fails()
        await asyncio.sleep(1)
        with pytest.raises(ConnectError) as raised:
            await pair.owners.ask(OWNER, RESOLVE)
        assert str(raised.value).count("circuit breaker") == 1
        assert "circuit breaker" not in pair.status.why

    async def test_agents_that_have_left_and_are_not_asked_again_are_forgotten_too(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        del pair.addresses[OWNER]
        assert pair.owners.peers() == ()
        other = AgentId("other")
        pair.addresses[other] = ("tcp://c:1",)
        with pytest.raises(ConnectError):
            await pair.owners.ask(other, RESOLVE)
        await asyncio.sleep(1)
        assert pair.serving.connections == []

    async def test_an_agent_that_has_left_is_forgotten(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        del pair.addresses[OWNER]
        await pair.fails(match="no address")
        assert pair.owners.peers() == ()
        await asyncio.sleep(1)
        assert pair.serving.connections == []

    async def test_a_peer_that_does_not_let_this_agent_in_is_told_until_it_does(self, pair: Pair) -> None:
        token = "another fabric's"
        owners = NetworkOwners(
            AgentId("asker"),
            here=LoopbackOwners(),
            address_of=lambda agent: pair.addresses.get(agent, ()),
            dice=random.Random(1),
            settings=SETTINGS,
            token=lambda: token,
            network=pair.network.host("b"),
        )
        with pytest.raises(ConnectError, match="is not valid for the role agent"):
            await owners.ask(OWNER, RingProgressQuery(0, FAR_S))
        (refused,) = owners.peers()
        assert (refused.is_refused, refused.is_held_off) == (True, False)
        assert "is not valid for the role agent" in refused.why
        token = "t"
        await asyncio.sleep(SETTINGS.backoff_max_s)
        await owners.ask(OWNER, RESOLVE)
        (let_in,) = owners.peers()
        assert (let_in.is_refused, let_in.why) == (False, "")
        await owners.close()

    async def test_an_agent_that_has_left_is_shown_no_more_though_nobody_has_asked_it_since(
        self, pair: Pair
    ) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        assert [peer.agent for peer in pair.owners.peers()] == [OWNER]
        del pair.addresses[OWNER]
        assert pair.owners.peers() == ()

    async def test_closing_ends_who_waits(self, pair: Pair) -> None:
        pair.owner.may_answer.clear()
        asking = asyncio.ensure_future(pair.fails(Commit(0, FAR_S, ()), match="closed"))
        await pair.owner.until(lambda: len(pair.owner.asked) == 1)
        pair.network.crash("c")
        pair.addresses[AgentId("other")] = ("tcp://c:1",)
        pair.network.part("b", "c")
        other = asyncio.ensure_future(pair.owners.ask(AgentId("other"), Commit(0, FAR_S, ())))
        await asyncio.sleep(0.01)
        await pair.owners.close()
        await asking
        with pytest.raises(ConnectError):
            await other
        with pytest.raises(ConnectError, match="being stopped"):
            await pair.owners.ask(OWNER, RESOLVE)

    async def test_what_was_asked_before_it_is_closed_dials_nobody_after_that(self, pair: Pair) -> None:
        asked = pair.owners.ask(OWNER, RESOLVE)
        assert isinstance(asked, Coroutine), "there is no connection yet"
        await pair.owners.close()
        with pytest.raises(ConnectError, match="closed by this agent"):
            await asked
        assert not pair.serving.connections

    async def test_what_is_late_at_once_is_held_against_a_peer_once(self, pair: Pair) -> None:
        await pair.owners.ask(OWNER, RESOLVE)
        pair.network.part("a", "b")
        late = [pair.owners.ask(OWNER, Commit(0, 0.1, ())) for _ in range(SETTINGS.breaker.failures_max)]
        ends = await asyncio.gather(*late, return_exceptions=True)
        assert {type(end) for end in ends} == {TimeoutError}
        await asyncio.sleep(2 * SETTINGS.patience_s)
        assert (pair.status.failures, pair.status.is_held_off) == (1, False)
