"""What only the front ends that do not wait have: tickets, a descriptor, cancelling, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, SOON_S, hashes, no_thread_to_be_had
from tests.sdk.failover.test_transfer_reconciler import lose
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInCopies, StandInDevices
from tests.sdk.operations.test_faults import is_whole
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, PutState, Reason, aio
from ostraca._operations.completions import Completion
from ostraca._operations.lookup import LookupJob
from ostraca._protocol.specs import LookupSpec
from ostraca_fabric.wire.messages import Failure, Get, Lookup, OpenVolume, Put

FAR_S = 30.0
UNTOUCHED = 0xEE


def opened(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def somewhere(blocks: int) -> NDArray[np.uint8]:
    return np.full((blocks, BLOCK_BYTES), UNTOUCHED, np.uint8)


def stored(volume: ostraca.Volume, blocks: int) -> tuple[ostraca.Chain, NDArray[np.uint8]]:
    chain = volume.chain(hashes(blocks))
    source = np.random.default_rng(blocks).integers(0, 255, (blocks, BLOCK_BYTES), np.uint8)
    assert volume.put(chain, source=source, deadline_s=FAR_S).accepted == blocks
    return chain, source


def take(client: ostraca.Client, count: int) -> list[Completion]:
    """Take what is done as an event loop would, until there are *count*."""
    taken: list[Completion] = []
    while len(taken) < count:
        readable, _, _ = select.select([client.fileno()], [], [], FAR_S)
        assert readable, "the descriptor never became readable"
        taken += client.take_completions()
    return taken


def reasons_of(result: object) -> set[Reason]:
    assert isinstance(result, ostraca.GetResult)
    return set(result.reasons)


def silent(_: AgentConnection, __: object) -> None:
    """Say nothing."""


def lack_memory(*_: object) -> NoReturn:
    raise MemoryError("there is no more")


class Unsynchronised(StandInDevices):
    """A device whose driver fails where copies are waited for, which the port does not provide for."""

    def copies(self, devices: Iterable[Hashable]) -> StandInCopies:
        super().copies(devices)
        return _Unsynchronised(self)


class _Unsynchronised(StandInCopies):
    def wait(self) -> bool:
        raise ValueError("the driver is of another release")


def test_what_is_submitted_is_done_in_any_order_and_each_ticket_once(client: ostraca.Client) -> None:
    volume = opened(client)
    chain, source = stored(volume, 24)
    memories = [somewhere(1) for _ in range(24)]
    tickets = [
        volume.submit_get(chain[block : block + 1], into=memories[block], deadline_s=FAR_S)
        for block in range(24)
    ]
    tickets.append(volume.submit_lookup([chain, chain[:3]], deadline_s=FAR_S))
    done = {each.ticket: each for each in take(client, 25)}
    assert set(done) == set(tickets)
    assert all(each.error is None for each in done.values())
    assert np.array_equal(np.concatenate(memories), source)
    found = done[tickets[-1]].result
    assert isinstance(found, ostraca.LookupResult)
    assert found.prefix == 3
    assert client.take_completions() == []
    assert select.select([client.fileno()], [], [], 0)[0] == []


def test_one_batch_larger_than_the_arena_and_others_beside_it_all_end(client: ostraca.Client) -> None:
    volume = opened(client)
    chain, source = stored(volume, 200)  # three times the arena
    memory, small = somewhere(200), [somewhere(1) for _ in range(8)]
    volume.submit_get(chain, into=memory, deadline_s=FAR_S)
    for block in range(8):
        volume.submit_get(chain[block : block + 1], into=small[block], deadline_s=FAR_S)
    results = [each.result for each in take(client, 9)]
    assert [reasons_of(result) for result in results] == [{Reason.NONE}] * 9
    assert np.array_equal(memory, source)
    assert np.array_equal(np.concatenate(small), source[:8])


def test_those_that_wait_for_slots_do_not_have_each_other_try_again(client: ostraca.Client) -> None:
    volume, told = opened(client), list[None]()
    chain = volume.chain(hashes(1))
    volume.submit_lookup(chain, deadline_s=FAR_S)
    take(client, 1)  # what carries tickets hears of room from here on
    with volume.slots(64, lengths=BLOCK_BYTES), ThreadPoolExecutor(2) as callers:  # all of the arena
        client._runtime.arena.ledger.listeners.append(lambda: told.append(None))
        for _ in range(2):
            volume.submit_get(chain, into=somewhere(1), deadline_s=SOON_S)
        calls = [callers.submit(volume.get, chain, into=somewhere(1), deadline_s=SOON_S) for _ in range(2)]
        results = [each.result for each in take(client, 2)] + [call.result() for call in calls]
        assert [reasons_of(result) for result in results] == [{Reason.DEADLINE}] * 4
        assert len(told) <= len(results), "as often as one of them ended, nothing else having changed"


def test_submitting_to_an_agent_that_is_gone_does_not_wait_and_ends_by_the_deadline(
    tmp_path: Path,
) -> None:
    mute = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with agent_at(tmp_path / "a.sock") as agent:
        client = ostraca.connect(agent.address, settings=SETTINGS)
        volume = opened(client)
    with client, mute:
        (tmp_path / "a.sock").unlink(missing_ok=True)
        mute.bind(str(tmp_path / "a.sock"))
        mute.listen()  # answers no Hello
        watch = Stopwatch()
        tickets = [volume.submit_lookup(volume.chain(hashes(2)), deadline_s=0.3) for _ in range(5)]
        assert watch.took_s < 0.2
        results = {each.ticket: each.result for each in take(client, 5)}
        took_s = watch.took_s
    assert set(results) == set(tickets)
    for result in results.values():
        assert isinstance(result, ostraca.LookupResult)
        assert set(result.reasons) <= {Reason.DEADLINE, Reason.DISCONNECTED}
    assert took_s < 1.0


def test_bad_arguments_are_refused_where_they_are_submitted(client: ostraca.Client) -> None:
    volume = opened(client)
    with pytest.raises(ostraca.UsageError, match="2 blocks"):
        volume.submit_get(volume.chain(hashes(3)), into=somewhere(2), deadline_s=FAR_S)
    with pytest.raises(ostraca.UsageError, match="deadline_s"):
        volume.submit_put(volume.chain(hashes(1)), source=somewhere(1), deadline_s=float("inf"))
    assert client.take_completions() == []


def test_a_refusal_of_the_agent_is_the_error_of_its_ticket(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    agent.script[Lookup] = lambda connection, message: connection.send(
        failed(message.request, "unknown_volume")
    )
    ticket = volume.submit_lookup(volume.chain(hashes(1)), deadline_s=FAR_S)
    (done,) = take(client, 1)
    assert (done.ticket, done.result) == (ticket, None)
    assert isinstance(done.error, ostraca.UnknownVolumeError)


def failed(request: int, code: str) -> Failure:
    return Failure(request, code, "gone")


def test_a_deadline_that_has_passed_and_an_empty_batch_are_done_at_once(client: ostraca.Client) -> None:
    volume = opened(client)
    chain = volume.chain(hashes(2))
    volume.submit_get(chain, into=somewhere(2), deadline_s=0)
    volume.submit_lookup(chain[:0], deadline_s=1)
    late, empty = (each.result for each in take(client, 2))
    assert isinstance(late, ostraca.GetResult)
    assert late.states == (BlockState.LATE,) * 2
    assert isinstance(empty, ostraca.LookupResult)
    assert empty.states == ()


def test_a_cancelled_get_ends_soon_and_nothing_is_written_afterwards(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, source = stored(volume, 4)
    asked = threading.Event()
    withheld: list[tuple[AgentConnection, Get]] = []

    def land_half(connection: AgentConnection, message: Get) -> None:
        connection.land(message, [0, 2])
        withheld.append((connection, message))
        asked.set()

    agent.script[Get] = land_half
    memory = somewhere(4)
    ticket = volume.submit_get(chain, into=memory, deadline_s=FAR_S)
    assert asked.wait(FAR_S)
    while not (memory[2] == source[2]).all():
        time.sleep(0.001)  # until what landed has been handed over
    client.cancel(ticket)
    (done,) = take(client, 1)
    assert isinstance(done.result, ostraca.GetResult)
    assert done.result.states == (BlockState.HIT, BlockState.LATE, BlockState.HIT, BlockState.LATE)
    assert done.result.reasons == (Reason.NONE, Reason.CANCELLED, Reason.NONE, Reason.CANCELLED)
    connection, message = withheld[0]
    connection.land(message, [1, 3])
    assert agent.cancelled.wait(FAR_S)
    agent.script.clear()
    assert (
        volume.lookup(chain, deadline_s=FAR_S).hits == 4
    )  # the connection has gone on past what landed late
    assert (memory[[1, 3]] == UNTOUCHED).all()
    client.cancel(ticket)
    assert client.take_completions() == []


def test_more_than_may_be_submitted_is_declined_until_something_is_taken(agent: ScriptedAgent) -> None:
    with ostraca.connect(agent.address, settings=replace(SETTINGS, submitted_max=2)) as client:
        volume = opened(client)
        chain = volume.chain(hashes(1))
        for _ in range(3):
            volume.submit_lookup(chain, deadline_s=FAR_S)
        results = [each.result for each in take(client, 3)]
        reasons = sorted(
            result.reasons[0].name for result in results if isinstance(result, ostraca.LookupResult)
        )
        assert reasons == ["NOT_FOUND", "NOT_FOUND", "OVERLOADED"]
        volume.submit_lookup(chain, deadline_s=FAR_S)
        (again,) = take(client, 1)
        assert isinstance(again.result, ostraca.LookupResult)
        assert again.result.reasons == (Reason.NOT_FOUND,)


def test_what_waits_for_a_dial_where_no_thread_can_be_had_is_declined_and_the_next_one_tries_again(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, source = stored(volume, 2)
    lose(client, agent.connections.get(timeout=FAR_S))
    with no_thread_to_be_had("ostraca-dial"):
        tickets = [volume.submit_get(chain, into=somewhere(2), deadline_s=FAR_S) for _ in range(2)]
        declined = {each.ticket: each.result for each in take(client, 2)}
        waited_for = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
    assert set(declined) == set(tickets)
    for result in (*declined.values(), waited_for):
        assert isinstance(result, ostraca.GetResult)
        assert set(result.reasons) == {Reason.OVERLOADED}
        assert result.note == "the process can start no more threads"
    volume.submit_get(chain, into=(memory := somewhere(2)), deadline_s=FAR_S)
    (done,) = take(client, 1)
    assert reasons_of(done.result) == {Reason.NONE}
    assert np.array_equal(memory, source)


def test_slots_that_could_not_be_put_for_lack_of_a_thread_come_back(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    lose(client, agent.connections.get(timeout=FAR_S))
    with no_thread_to_be_had("ostraca-dial"):
        volume.submit_put_slots(
            volume.chain(hashes(64)), volume.slots(64, lengths=BLOCK_BYTES), deadline_s=FAR_S
        )
        (done,) = take(client, 1)
    assert isinstance(done.result, ostraca.PutResult)
    assert set(done.result.reasons) == {Reason.OVERLOADED}
    with volume.slots(64, lengths=BLOCK_BYTES):
        """All of the arena."""


@pytest.mark.parametrize("refused", ["ostraca-driver", "ostraca-connect", "ostraca-io"])
def test_connecting_where_no_thread_can_be_had_is_an_error_and_leaves_nothing(
    agent: ScriptedAgent, refused: str
) -> None:
    with no_thread_to_be_had(refused), pytest.raises(ostraca.ConnectError, match="thread"):
        ostraca.connect(agent.address, settings=SETTINGS)
    with ostraca.connect(agent.address, settings=SETTINGS) as client:
        assert stored(opened(client), 2)


@pytest.mark.parametrize("way", ["at hand", "to be reached", "late"])
def test_what_a_job_raises_is_the_error_of_its_ticket_and_others_go_on(
    agent: ScriptedAgent, client: ostraca.Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    volume = opened(client)
    deadline_s = 0 if way == "late" else FAR_S
    spec = LookupSpec(volume=volume._spec, chains=volume.chain(hashes(1)), deadline_s=deadline_s)
    broken = LookupJob(client._runtime, spec)
    monkeypatch.setattr(broken, "result" if way == "late" else "begin", lack_memory)
    if way == "to be reached":
        agent.connections.get(timeout=FAR_S).hang_up()
        with client._runtime.arena.changed:
            assert client._runtime.arena.changed.wait_for(lambda: not client.is_connected, timeout=FAR_S)
    ticket = client._runner.submit(broken)
    (done,) = take(client, 1)
    assert (done.ticket, done.result, type(done.error)) == (ticket, None, MemoryError)
    volume.submit_lookup(volume.chain(hashes(1)), deadline_s=FAR_S)
    (after,) = take(client, 1)
    assert isinstance(after.result, ostraca.LookupResult)
    assert after.result.reasons == (Reason.NOT_FOUND,)
    assert client._runtime.connections.session is not None
    assert client._runtime.connections.session._users == 0


@pytest.mark.parametrize("operation", ["lookup", "prefetch", "get", "get_views", "put", "put_slots"])
def test_a_request_that_fails_on_its_way_out_gives_its_place_and_slots_back(
    client: ostraca.Client, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    volume = opened(client)
    chain, source = stored(volume, 3)
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: volume.lookup(chain, deadline_s=FAR_S),
        "prefetch": lambda: volume.prefetch(chain, deadline_s=FAR_S),
        "get": lambda: volume.get(chain, into=somewhere(3), deadline_s=FAR_S),
        "get_views": lambda: volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S),
        "put": lambda: volume.put(chain, source=source, deadline_s=FAR_S),
        "put_slots": lambda: volume.put_slots(chain, volume.slots(3, lengths=BLOCK_BYTES), deadline_s=FAR_S),
    }
    with monkeypatch.context() as patch:
        patch.setattr("ostraca._connection.session.encode", lack_memory)
        with pytest.raises(MemoryError):
            calls[operation]()
    assert is_whole(client)
    session = client._runtime.connections.session
    assert session is not None
    assert (session._inflight, session._users) == (set(), 0)
    assert volume.get(chain, into=somewhere(3), deadline_s=FAR_S).hits == 3


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_what_is_raised_when_a_get_is_given_up_is_the_error_of_its_ticket_and_others_go_on(
    agent: ScriptedAgent, client: ostraca.Client, end: str
) -> None:
    client._runtime.devices = Unsynchronised()
    volume, asked = opened(client), threading.Event()
    agent.script[Get] = lambda *_: asked.set()
    into = DeviceArray(somewhere(1))
    ticket = volume.submit_get(
        volume.chain(hashes(1)), into=into, deadline_s=SOON_S if end == "deadline" else FAR_S
    )
    assert asked.wait(FAR_S)
    if end == "cancel":
        client.cancel(ticket)
    (done,) = take(client, 1)
    assert (done.ticket, done.result, type(done.error)) == (ticket, None, ValueError)
    volume.submit_lookup(volume.chain(hashes(1)), deadline_s=FAR_S)
    (after,) = take(client, 1)
    assert isinstance(after.result, ostraca.LookupResult)
    assert after.result.reasons == (Reason.NOT_FOUND,)


def test_closing_the_client_ends_what_was_submitted(agent: ScriptedAgent) -> None:
    agent.script = dict.fromkeys((Get, Put), silent)
    client = ostraca.connect(agent.address, settings=SETTINGS)
    volume = opened(client)
    chain, memory = volume.chain(hashes(2)), somewhere(2)
    volume.submit_get(chain, into=memory, deadline_s=FAR_S)
    volume.submit_put(chain, source=memory, deadline_s=FAR_S)
    watch = Stopwatch()
    client.close()
    assert watch.took_s < 4.0
    results = [each.result for each in client.take_completions()]
    assert len(results) == 2
    for result in results:
        assert isinstance(result, ostraca.GetResult | ostraca.PutResult)
        assert set(result.reasons) == {Reason.DISCONNECTED}
    assert client.fileno() == -1
    with pytest.raises(ostraca.ClosedError):
        volume.submit_get(chain, into=memory, deadline_s=FAR_S)


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_closed_client_keeps_no_memory_of_gets_that_waited_for_a_connection(
    agent: ScriptedAgent, *, has_threads: bool
) -> None:
    client = ostraca.connect(agent.address, settings=SETTINGS)
    volume = opened(client)
    chain, memory = volume.chain(hashes(2)), [somewhere(2) for _ in range(3)]
    agent.script = {OpenVolume: silent}
    lose(client, agent.connections.get(timeout=FAR_S))
    with contextlib.nullcontext() if has_threads else no_thread_to_be_had("ostraca-dial"):
        for into in memory:
            volume.submit_get(chain, into=into, deadline_s=FAR_S)
        if has_threads:
            client.close()
        done = client.take_completions() if has_threads else take(client, 3)
    assert len(done) == 3
    kept = [weakref.ref(into) for into in memory]
    del into, memory
    gc.collect()
    assert [each() for each in kept] == [None] * 3
    client.close()


def test_a_lost_connection_ends_what_was_submitted_and_the_next_one_dials_again(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, source = stored(volume, 2)
    agent.script[Get] = lambda connection, _: connection.hang_up()
    volume.submit_get(chain, into=somewhere(2), deadline_s=FAR_S)
    (lost,) = take(client, 1)
    assert isinstance(lost.result, ostraca.GetResult)
    assert lost.result.reasons == (Reason.DISCONNECTED,) * 2
    agent.script.clear()
    memory = somewhere(2)
    while not (memory == source).all():
        volume.submit_get(chain, into=memory, deadline_s=FAR_S)
        take(client, 1)
    assert len(agent.seen_of(OpenVolume)) == 2


def test_a_forked_child_may_not_use_tickets(client: ostraca.Client) -> None:
    volume = opened(client)
    chain = volume.chain(hashes(1))
    ticket = volume.submit_lookup(chain, deadline_s=FAR_S)
    take(client, 1)
    child = os.fork()
    if not child:
        calls: list[Callable[[], object]] = [
            lambda: volume.submit_lookup(chain, deadline_s=1),
            client.take_completions,
            lambda: client.cancel(ticket),
        ]
        refused = 0
        for call in calls:
            try:
                call()
            except ostraca.ClosedError:
                refused += 1
        os._exit(0 if refused == len(calls) else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- asyncio ------------------------------------------------------------------------------------------------


async def test_a_client_of_asyncio_does_all_there_is(agent: ScriptedAgent) -> None:
    async with await aio.connect(agent.address, settings=SETTINGS) as client:
        volume = await client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain = volume.chain(hashes(6))
        source, memory = np.ones((6, BLOCK_BYTES), np.uint8), somewhere(6)
        assert (await volume.put(chain, source=source, deadline_s=FAR_S)).accepted == 6
        found, got = await asyncio.gather(
            volume.lookup(chain, deadline_s=FAR_S), volume.get(chain, into=memory, deadline_s=FAR_S)
        )
        assert (found.prefix, got.prefix) == (6, 6)
        assert np.array_equal(memory, source)
        with await volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S) as views:
            assert views[5] == source[5].tobytes()
        with volume.blocking.slots(1, lengths=BLOCK_BYTES) as lease:
            assert (
                await volume.put_slots(volume.chain(hashes(1, "other")), lease, deadline_s=FAR_S)
            ).accepted == 1


async def test_a_cancelled_task_goes_on_only_when_its_operation_has_ended(agent: ScriptedAgent) -> None:
    async with await aio.connect(agent.address, settings=SETTINGS) as client:
        volume = await client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain = volume.chain(hashes(2))
        await volume.put(chain, source=np.ones((2, BLOCK_BYTES), np.uint8), deadline_s=FAR_S)
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ask(_: AgentConnection, __: Get) -> None:
            loop.call_soon_threadsafe(asked.set)

        agent.script[Get] = ask
        task = asyncio.create_task(volume.get(chain, into=somewhere(2), deadline_s=FAR_S))
        await asked.wait()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(agent.cancelled.wait, FAR_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(volume.get(chain, into=somewhere(2), deadline_s=FAR_S), 0.05)


async def test_what_is_awaited_where_no_thread_can_be_had_is_declined(agent: ScriptedAgent) -> None:
    async with await aio.connect(agent.address, settings=SETTINGS) as client:
        volume = await client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain = volume.chain(hashes(1))
        await asyncio.to_thread(lose, client.blocking, agent.connections.get(timeout=FAR_S))
        with no_thread_to_be_had("ostraca-dial"):
            found = await volume.lookup(chain, deadline_s=FAR_S)
        assert found.reasons == (Reason.OVERLOADED,)
        assert (await volume.lookup(chain, deadline_s=FAR_S)).reasons == (Reason.NOT_FOUND,)


async def test_while_an_operation_waits_the_loop_goes_on(agent: ScriptedAgent) -> None:
    async with await aio.connect(agent.address, settings=SETTINGS) as client:
        volume = await client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        agent.script[Lookup] = silent
        waiting = asyncio.create_task(volume.lookup(volume.chain(hashes(1)), deadline_s=0.2))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10
        assert (await waiting).states == (BlockState.LATE,)


def test_states_of_puts_are_those_of_the_blocking_call(client: ostraca.Client) -> None:
    volume = opened(client)
    chain, source = stored(volume, 2)
    volume.submit_put(chain, source=source, deadline_s=FAR_S)
    (done,) = take(client, 1)
    assert isinstance(done.result, ostraca.PutResult)
    assert done.result.states == (PutState.EXISTS,) * 2
