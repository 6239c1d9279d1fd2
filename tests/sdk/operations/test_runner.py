"""Signal handlers that raise, close or call while an operation waits; and what callers drop."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.operations.test_faults import FAR_S, UNTOUCHED, is_whole, silent, somewhere, stored
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import Reason
from ostraca_fabric.wire.messages import Get

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="handlers run in the main thread"
)


class Raised(BaseException):
    """By a handler."""


def raise_it() -> None:
    raise Raised


@contextmanager
def handled(act: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Do something in a signal handler of the main thread; yield what sends the signal."""
    usual = signal.signal(signal.SIGUSR1, lambda _, __: act())
    main = threading.main_thread().ident
    assert main is not None
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, usual)


def opened(client: ostraca.Client) -> ostraca.Volume:
    return client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


def test_nothing_lands_after_a_get_that_a_handler_interrupted(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, _ = stored(volume, 2)
    withheld: list[tuple[AgentConnection, Get]] = []
    memory = somewhere(2)
    with handled(raise_it) as send:

        def withhold(connection: AgentConnection, message: Get) -> None:
            withheld.append((connection, message))
            send()

        agent.script[Get] = withhold
        with pytest.raises(Raised):
            volume.get(chain, into=memory, deadline_s=FAR_S)
    connection, message = withheld[0]
    assert agent.cancelled.wait(FAR_S), "the agent is told that nobody waits"
    connection.land(message, [0, 1])
    agent.script.clear()
    assert volume.get(chain, into=somewhere(2), deadline_s=FAR_S).hits == 2
    assert (memory == UNTOUCHED).all()


def test_a_handler_may_close_the_client_in_the_middle_of_a_get(agent: ScriptedAgent) -> None:
    client = ostraca.connect(agent.address, settings=SETTINGS)
    volume, watch = opened(client), Stopwatch()
    with handled(client.close) as send:
        agent.script[Get] = lambda *_: send()
        got = volume.get(volume.chain(hashes(2)), into=somewhere(2), deadline_s=FAR_S)
    assert set(got.reasons) == {Reason.DISCONNECTED}
    assert watch.took_s < 5.0
    with pytest.raises(ostraca.ClosedError):
        volume.get(volume.chain(hashes(2)), into=somewhere(2), deadline_s=FAR_S)


def test_a_handler_may_call_the_client_in_the_middle_of_a_get(
    agent: ScriptedAgent, client: ostraca.Client
) -> None:
    volume = opened(client)
    chain, _ = stored(volume, 2)
    seen: list[object] = []

    def look() -> None:
        seen.append(volume.lookup(chain, deadline_s=FAR_S).hits)
        seen.append(client.metrics().operation("put").requests)
        seen.append(client.take_completions())
        with volume.slots(1, lengths=BLOCK_BYTES):
            agent.script.clear()

    with handled(look) as send:

        def answer_late(connection: AgentConnection, message: Get) -> None:
            send()
            threading.Timer(0.05, ScriptedAgent.usual, (connection, message)).start()

        agent.script[Get] = answer_late
        assert volume.get(chain, into=somewhere(2), deadline_s=FAR_S).hits == 2
    assert seen == [2, 1, []]


def test_connecting_that_a_handler_interrupts_leaves_no_client(tmp_path: Path) -> None:
    with handled(raise_it) as send, socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()

        def send_when_called() -> None:
            with mute.accept()[0]:
                send()
                ended.wait(FAR_S)

        ended = threading.Event()
        calling = threading.Thread(target=send_when_called)
        calling.start()
        with pytest.raises(Raised):
            ostraca.connect(f"unix://{tmp_path / 'mute.sock'}", settings=SETTINGS, timeout_s=FAR_S)
        ended.set()
        calling.join()
    await_no_thread("ostraca-driver", "ostraca-io", "ostraca-connect")


def await_no_thread(*names: str) -> None:
    until_s = time.monotonic() + FAR_S
    while left := [thread.name for thread in threading.enumerate() if thread.name in names]:
        assert time.monotonic() < until_s, left
        time.sleep(0.001)  # no thread tells when it has ended


def test_views_and_leases_that_are_dropped_give_their_slots_back(client: ostraca.Client) -> None:
    volume = opened(client)
    chain, source = stored(volume, 4)
    views = volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S)
    kept = np.frombuffer(views[2] or b"", np.uint8)
    del views
    lease = volume.slots(60, lengths=BLOCK_BYTES)
    with pytest.raises(ostraca.UsageError, match="not free"):
        volume.slots(1, lengths=BLOCK_BYTES)
    del lease
    with volume.slots(60, lengths=BLOCK_BYTES):
        assert np.array_equal(kept, source[2]), "a view keeps the slots of its get"
    del kept
    with volume.slots(64, lengths=BLOCK_BYTES):
        """All of the arena."""


def test_dropped_views_end_though_no_operation_follows(client: ostraca.Client) -> None:
    volume = opened(client)
    chain, _ = stored(volume, 4)
    views = volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S)
    await_idle_driver(client)
    assert client._runtime.holds._held
    del views
    until_s = time.monotonic() + FAR_S
    while client._runtime.holds._held:
        assert time.monotonic() < until_s
        time.sleep(0.01)  # nothing tells


def await_idle_driver(client: ostraca.Client) -> None:
    """Wait until the driver sleeps on the connection."""
    session = client._runtime.connections.session
    assert session is not None
    until_s = time.monotonic() + FAR_S
    while not session._loop.is_led:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_an_exception_within_a_lease_is_not_hidden_by_arrays_that_its_frames_see(
    client: ostraca.Client,
) -> None:
    volume = opened(client)

    def fill() -> None:
        with volume.slots(4, lengths=BLOCK_BYTES) as lease:
            array = np.frombuffer(lease[0], np.uint8)
            raise Raised(array.nbytes)

    with pytest.raises(Raised):
        fill()
    gc.collect()
    client._runner.do(lambda: None)  # comes behind what was dropped
    assert is_whole(client)


def test_a_finalizer_in_the_clients_own_thread_waits_for_nothing(client: ostraca.Client) -> None:
    volume, region = opened(client), client.register(somewhere(2))
    chain, _ = stored(volume, 2)
    said: list[str] = []

    def finalize() -> None:
        region.unregister()
        for call in (
            lambda: volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S),
            lambda: volume.slots(1, lengths=8),
        ):
            with pytest.raises(ostraca.UsageError) as refused:
                call()
            said.append(str(refused.value))

    client._runner.do(finalize)
    assert said == ["a finalizer in the client's own thread can't wait for the client: submit it"] * 2
    with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=FAR_S) as views:
        assert views.result.hits == 2
    watch = Stopwatch()
    client._runner.do(client.close)
    assert watch.took_s < 5, "half of the wait for other threads"


def test_a_client_that_is_dropped_ends_and_says_so(agent: ScriptedAgent) -> None:
    client = ostraca.connect(agent.address, settings=SETTINGS)
    connection = agent.connections.get(timeout=FAR_S)
    with pytest.warns(ResourceWarning, match="was dropped and not closed"):
        del client
    assert connection.is_gone.wait(FAR_S)
    await_no_thread("ostraca-driver", "ostraca-io")


def test_closing_twice_and_from_several_threads_returns_each_time(agent: ScriptedAgent) -> None:
    client = ostraca.connect(agent.address, settings=SETTINGS)
    agent.script[Get] = silent
    threads = [threading.Thread(target=client.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    client.close()
    for thread in threads:
        thread.join(FAR_S)
        assert not thread.is_alive()
