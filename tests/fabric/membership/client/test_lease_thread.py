"""The thread of leases beside other users of grpc.aio, in forked processes, and at a process's end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from ostraca_fabric.errors import MembershipError
from ostraca_fabric.membership.etcd.client.client import EtcdClient
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.lease import LeaseKeeper

ROUNDS = 200
"""While each keeper closed the loop of its own thread, one round in some dozens logged an error, or more."""

BEGUN = 8

TTL_S = 2.0

ENDED_WITHIN_S = 90
"""Programs here take half a second, and have taken ten beside busy processes of a higher priority."""

MACHINE_IS_BUSY = re.compile(r"Executing <.*> took [0-9.]+ seconds")
"""What asyncio's debug mode says of a step that took a tenth of a second: here it waited for a processor."""


class SilentEtcd:
    """Takes connections, and answers nothing."""

    def __init__(self) -> None:
        self.port = 0
        self._connections: list[asyncio.BaseTransport] = []
        self._spoken: set[asyncio.BaseTransport] = set()
        self._heard = asyncio.Event()

    @property
    def settings(self) -> EtcdSettings:
        return EtcdSettings((f"127.0.0.1:{self.port}",))

    async def until_called(self, callers: int) -> None:
        """Wait until something was said on so many connections, since the first."""
        while len(self._spoken) < callers:
            self._heard.clear()
            await self._heard.wait()

    def take(self) -> asyncio.Protocol:
        silent = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                silent._connections.append(transport)

            def data_received(self, _: bytes) -> None:
                silent._spoken.add(self.transport)
                silent._heard.set()

        return Connection()

    def close(self) -> None:
        for each in self._connections:
            each.close()


@pytest.fixture
async def silent_etcd() -> AsyncIterator[SilentEtcd]:
    silent = SilentEtcd()
    server = await asyncio.get_running_loop().create_server(silent.take, "127.0.0.1", 0)
    silent.port = server.sockets[0].getsockname()[1]
    async with server:
        yield silent
        silent.close()
        server.close()


async def test_a_keeper_closed_with_calls_under_way_leaves_nothing_for_other_loops_to_complain_of(
    silent_etcd: SilentEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    """grpc.aio has one poller for all loops of a process: this loop takes what it found for the keeper's."""

    async def ask(client: EtcdClient) -> None:
        while True:
            with contextlib.suppress(MembershipError):
                await client.range(b"/asked")

    client = EtcdClient(silent_etcd.settings, dice=random.Random(1))
    asking = [asyncio.create_task(ask(client)) for _ in range(4)]
    await silent_etcd.until_called(1)
    for round_ in range(ROUNDS):
        keeper = LeaseKeeper(silent_etcd.settings, dice=random.Random(2))
        beginning = [asyncio.create_task(keeper.begin(TTL_S, lambda: None)) for _ in range(BEGUN)]
        await silent_etcd.until_called(round_ + 2)
        for task in beginning:
            task.cancel()
        await asyncio.wait(beginning)
        await asyncio.to_thread(keeper.close)
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    await client.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_closing_a_keeper_leaves_other_keepers_what_they_asked(silent_etcd: SilentEtcd) -> None:
    closed, other = (LeaseKeeper(silent_etcd.settings, dice=random.Random(n)) for n in range(2))
    given_up = asyncio.create_task(closed.begin(TTL_S, lambda: None))
    await silent_etcd.until_called(1)
    waiting = asyncio.create_task(other.begin(TTL_S, lambda: None))
    await silent_etcd.until_called(2)
    await asyncio.to_thread(closed.close)
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(MembershipError, match="closed"):
        await closed.begin(TTL_S, lambda: None)
    assert not waiting.done()
    await asyncio.to_thread(other.close)
    with pytest.raises(asyncio.CancelledError):
        await waiting


def ends_in_silence(program: str) -> bool:
    """Whether a program of its own ends well, and in time, without a word. One that hangs says where."""
    watched = (
        f"import faulthandler; faulthandler.dump_traceback_later({ENDED_WITHIN_S}, exit=True)\n{program}"
    )
    command = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", watched]
    # What hangs in the interpreter's own last steps has no watch any more.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ENDED_WITHIN_S + 10, check=False)
    said = [line for line in ended.stderr.splitlines() if not MACHINE_IS_BUSY.fullmatch(line)]
    assert (ended.returncode, ended.stdout, said) == (0, "", []), ended.stderr
    return True


def test_a_process_ends_with_a_keeper_that_nobody_closed() -> None:
    assert ends_in_silence("""
import asyncio, random, socket
from ostraca_fabric.membership.etcd.lease import LeaseKeeper
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings

async def begin_and_leave():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = EtcdSettings((f"127.0.0.1:{silent.getsockname()[1]}",))
        keeper = LeaseKeeper(settings, dice=random.Random(1))
        beginning = asyncio.create_task(keeper.begin(2.0, lambda: None))
        taken, _ = await asyncio.to_thread(silent.accept)
        taken.close()

asyncio.run(begin_and_leave())
""")


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    assert ends_in_silence("""
import asyncio, os
from ostraca_fabric.membership.etcd.lease import lease_thread

async def who():
    return os.getpid()

def works(thread):
    thread.enter()
    assert thread.submit(who()).result() == os.getpid()

thread = lease_thread()
works(thread)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0
else:
    assert not thread.is_alive
    assert lease_thread() is not thread
    works(lease_thread())
    lease_thread().leave()
    os._exit(0)
assert thread.submit(who()).result() == os.getpid()
thread.leave()
assert not thread.is_alive
""")
