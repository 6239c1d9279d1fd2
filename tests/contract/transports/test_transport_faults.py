"""What becomes of transfers over NIXL, and of the processes at both ends, when connections break."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tests.contract.network.sockets import cut_internet
from tests.contract.transports.arena_host import ArenaHost
from tests.contract.transports.transport_bench import (
    ARENA,
    CHUNK,
    DONE,
    FAILED,
    PAGE,
    STAGING,
    TO_WORKER,
    noise,
    wave,
)
from tests.support.agent.moving import move

from ostraca_dpu_agent.adapters.transports import nixl_thread
from ostraca_dpu_agent.adapters.transports.nixl_peer import NixlPeer
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlSettings, NixlTransport
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.nixl.runtime import unique_name
from ostraca_fabric.ports.transport import BulkChannel, Direction, TransferEnd
from ostraca_fabric.runtime.memory import HugeMemory

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed"),
]


class Channel:
    """A control connection that notes when it is broken off."""

    def __init__(self) -> None:
        self.ends_known_when_broken_off: list[bool] = []
        self.watched: asyncio.Future[TransferEnd] | None = None

    def break_off(self, why: str, *, code: str = "transport") -> None:
        self.ends_known_when_broken_off.append(self.watched is not None and self.watched.done())


class Pair:
    """An agent's end in this process, and a worker in another."""

    def __init__(self, transport: NixlTransport, memory: HugeMemory, host: ArenaHost) -> None:
        self.transport = transport
        self.memory = memory
        self.host = host
        self.channel = Channel()

    async def attach(self) -> NixlPeer:
        channel = cast("BulkChannel", self.channel)
        return await self.transport.attach(self.host.offer, self.memory.view, channel)

    async def ends_well(self, *peers: NixlPeer) -> None:
        """Both processes are there, serve a new connection, and end as they should."""
        fresh = await self.attach()
        for direction in Direction:
            assert await move(fresh, direction, wave(4, PAGE, PAGE)) is DONE
        for peer in (*peers, fresh):
            peer.close()
        await self.transport.close()
        assert await asyncio.to_thread(self.host.stop) == 0


@asynccontextmanager
async def paired(directory: Path, settings: NixlSettings | None = None) -> AsyncIterator[Pair]:
    transport = NixlTransport.create("agent", settings)
    memory = HugeMemory(STAGING, prefault=True)
    transport.register(memory.view, chunk_bytes=CHUNK)
    host = ArenaHost("nixl", directory, arena_bytes=ARENA, chunk_bytes=CHUNK)
    try:
        yield Pair(transport, memory, host)
    finally:
        host.kill()
        await transport.close()
        memory.leak()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> NixlSettings:
    """NIXL where shared memory can't be used: as between containers."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return NixlSettings(unaided_only=False)


async def test_a_worker_that_only_tcp_reaches_is_refused_because_its_help_could_kill_it(
    tmp_path: Path, over_tcp: NixlSettings
) -> None:
    async with paired(tmp_path, NixlSettings()) as pair:
        for _ in range(3):
            with pytest.raises(TransportError, match="only with the worker's help"):
                await pair.attach()
        assert pair.channel.ends_known_when_broken_off == []
        assert await asyncio.to_thread(pair.host.stop) == 0, "and being refused harms it not"


async def test_a_worker_that_shared_memory_reaches_is_taken_every_time(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        for _ in range(5):
            (await pair.attach()).close()
        await pair.ends_well()


@pytest.mark.parametrize("whose", ["worker's", "agent's"])
async def test_a_transfer_over_a_broken_way_fails_and_first_breaks_the_control_connection_off(
    tmp_path: Path, whose: str
) -> None:
    async with paired(tmp_path) as pair:
        peer = await pair.attach()
        assert await move(peer, TO_WORKER, wave(4, PAGE, PAGE)) is DONE
        assert pair.host.process.pid is not None
        pid = pair.host.process.pid if whose == "worker's" else os.getpid()
        assert cut_internet(pid) > 0
        await has_noticed(pair)
        pair.channel.watched = end = move(peer, TO_WORKER, wave(4, PAGE, PAGE))
        assert await asyncio.wait_for(end, 10) is FAILED
        assert pair.channel.ends_known_when_broken_off == [False]
        await pair.ends_well(peer)


async def has_noticed(pair: Pair) -> None:
    """Let the agent's NIXL read what has come for it, the end of its connections too."""
    agent, thread = pair.transport._agent, pair.transport._thread
    for _ in range(200):
        await asyncio.wrap_future(thread.call(agent.progress))


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_worker_that_is_stopped_while_its_connections_break_ends_no_transfer_as_done(
    tmp_path: Path, direction: Direction
) -> None:
    """Through shared memory a transfer needs no worker, running or not; it is done, or never begins."""
    async with paired(tmp_path) as pair:
        peer = await pair.attach()
        pair.host.pause()
        assert await move(peer, direction, wave(16, 1 << 20, 1 << 20)) is DONE
        assert pair.host.process.pid is not None
        cut_internet(pair.host.process.pid)
        await has_noticed(pair)
        assert await asyncio.wait_for(move(peer, direction, wave(16, 1 << 20, 1 << 20)), 10) is FAILED
        pair.host.resume()
        await pair.ends_well(peer)


@pytest.mark.parametrize(("is_renewed", "is_prepared"), [(True, False), (True, True), (False, False)])
async def test_what_a_worker_had_received_lands_late_unless_its_end_was_renewed(
    tmp_path: Path, over_tcp: NixlSettings, is_renewed: bool, is_prepared: bool
) -> None:
    """The last case is what renewing is for: the bytes wait in the worker's socket, whoever is gone."""
    async with paired(tmp_path, over_tcp) as pair:
        peer = await pair.attach()
        if is_prepared:
            await pair.host.prepare_renewal()
        await pair.host.fill(0, bytes(ARENA))
        await pair.host.sit_still(True)
        pair.memory.array[:STAGING] = noise(STAGING, 11)
        end = move(peer, TO_WORKER, wave(64, PAGE, PAGE))
        await has_noticed(pair)
        assert not end.done()
        assert cut_internet(os.getpid()) > 0
        assert await asyncio.wait_for(end, 10) is FAILED
        assert await pair.host.peek(0, ARENA) == bytes(ARENA)
        if is_renewed:
            await pair.host.renew()
        await pair.host.sit_still(False)
        fresh = await pair.attach()  # takes many turns of the worker's progress
        landed = np.frombuffer(await pair.host.peek(0, ARENA), np.uint8).any()
        assert landed != is_renewed
        fresh.close()
        await pair.ends_well(peer)


async def test_an_end_that_is_renewed_under_a_transfer_lets_the_agent_know_that_it_ended(
    tmp_path: Path, over_tcp: NixlSettings
) -> None:
    async with paired(tmp_path, over_tcp) as pair:
        peer = await pair.attach()
        pair.host.pause()
        ends = [move(peer, direction, wave(16, 1 << 20, 1 << 20)) for direction in Direction]
        await has_noticed(pair)
        assert [end.done() for end in ends] == [False, False]
        renewing = asyncio.create_task(pair.host.renew())
        pair.host.resume()
        await renewing
        assert set(await asyncio.wait_for(asyncio.gather(*ends), 10)) <= {DONE, FAILED}
        await pair.ends_well(peer)


def test_a_thread_that_nixl_keeps_for_ever_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "STUCK_S", 0.05)
    comes_back = threading.Event()
    thread = nixl_thread.NixlThread(runtime.NixlAgent(unique_name("stuck")))
    stuck = thread.call(comes_back.wait)
    assert not thread.stop(wait_s=0.05)  # or this test ends by its time limit
    comes_back.set()
    assert stuck.result(10)
    assert thread.stop(wait_s=10), "it ends once it is given back"


def test_what_ucx_has_to_say_is_raised_and_not_printed_where_a_worker_s_own_words_go() -> None:
    program = """
from ostraca_fabric.nixl.runtime import NixlAgent
from ostraca_fabric.errors import TransportError
try:
    NixlAgent("told nonsense")
except TransportError:
    print("refused")
"""
    environment = {name: value for name, value in os.environ.items() if name != "UCX_LOG_LEVEL"}
    environment["UCX_TCP_TX_SEG_SIZE"] = "nonsense"
    said = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "refused\n"
