"""Whom a worker reaches by a host's name, and how long it takes to find out."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.support.stalls import Stopwatch

from ostraca._connection import resolve
from ostraca._connection.credentials import Credentials
from ostraca._connection.dial import ClientIdentity, UnreachableError, dial
from ostraca._connection.resolve import connect_tcp
from ostraca_fabric.wire.address import TcpAddress

NAME = "agent.pod.example"
SOON_S = 0.2
SLACK_S = 0.1


class Resolver:
    """Stands in for the system's where it is asked for a name; says nothing before it ``answers``."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.places: list[tuple[str, int]] = []
        """What it says; where that is empty, this host."""

        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, **how: Any) -> list[Any]:
        if how.get("flags"):
            return self._real(host, port, **how)
        self.asked += 1
        assert self.answers.wait(60)
        places = self.places or [("127.0.0.1", port)]
        return [each for place in places for each in self._real(*place, **how)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.answers.set()
    await_look_ups()
    resolve._lookups.clear()


def await_look_ups() -> None:
    for thread in threading.enumerate():
        if thread.name == "ostraca-names":
            thread.join()


def soon() -> float:
    return time.monotonic() + SOON_S


def test_a_name_that_nobody_resolves_takes_the_time_of_who_dials_and_no_more(resolver: Resolver) -> None:
    address = TcpAddress(NAME, 7400)
    for _ in range(3):
        watch = Stopwatch()
        with pytest.raises(UnreachableError, match="not resolved in time") as gone:
            dial([address], ClientIdentity("default", Credentials(), {}), until_s=soon())
        assert watch.passed_s >= SOON_S
        assert watch.took_s < SOON_S + SLACK_S
        assert gone.value.silent == [address]
    assert resolver.asked == 1, "no more than one thread waits for it"


def test_an_answer_that_comes_late_is_the_next_caller_s_for_a_while(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TimeoutError):
            connect_tcp(NAME, port, soon())
        resolver.answers.set()
        await_look_ups()
        connect_tcp(NAME, port, time.monotonic() + 10).close()
        assert resolver.asked == 1
        connect_tcp(NAME, port, time.monotonic() + 10).close()
        assert resolver.asked == 2, "it is taken once"

        resolver.answers.clear()
        with pytest.raises(TimeoutError):
            connect_tcp(NAME, port, soon())
        resolver.answers.set()
        await_look_ups()
        monkeypatch.setattr(resolve, "_FRESH_S", -1.0)
        connect_tcp(NAME, port, time.monotonic() + 10).close()
        assert resolver.asked == 4, "and not when it is old"


def test_addresses_are_looked_up_by_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect_tcp("127.0.0.1", server.getsockname()[1], time.monotonic() + 10).close()
    assert not resolve._lookups
    await_look_ups()


@contextmanager
def silent() -> Iterator[tuple[str, int]]:
    """Give an address that takes no connection and refuses none: its queue is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.settimeout(0.05)
            try:
                client.connect(server.getsockname())
            except TimeoutError:
                yield server.getsockname()
                return
    pytest.fail("connections are taken without end")


def test_an_address_from_which_nothing_comes_leaves_time_for_the_host_s_others(resolver: Resolver) -> None:
    resolver.answers.set()
    with silent() as nothing, socket.create_server(("127.0.0.1", 0)) as server:
        resolver.places = [nothing, server.getsockname()]
        watch = Stopwatch()
        with connect_tcp(NAME, 7400, soon()) as sock:
            assert sock.getpeername() == server.getsockname()
            assert 0 < (sock.gettimeout() or 0) <= SOON_S
        assert watch.took_s < SOON_S


def test_a_host_of_several_addresses_from_which_nothing_comes_takes_no_more_than_one_of_one(
    resolver: Resolver,
) -> None:
    resolver.answers.set()
    with silent() as nothing, socket.create_server(("127.0.0.1", 0)) as server:
        refusing = server.getsockname()
        server.close()
        for places in ([nothing, nothing], [nothing, refusing], [refusing, nothing]):
            resolver.places = places
            watch = Stopwatch()
            with pytest.raises(TimeoutError):  # to try it again would take as long
                connect_tcp(NAME, 7400, soon())
            assert watch.took_s < SOON_S + SLACK_S
        resolver.places = [refusing, refusing]
        with pytest.raises(ConnectionRefusedError):
            connect_tcp(NAME, 7400, soon())


def test_a_name_that_is_none_is_refused_with_words(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str, *_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UnreachableError, match="Name or service not known") as gone:
        dial([TcpAddress(NAME, 7400)], ClientIdentity("default", Credentials(), {}), until_s=soon())
    assert gone.value.silent == []


def test_a_process_forked_meanwhile_looks_up_for_itself(resolver: Resolver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(TimeoutError):
            connect_tcp(NAME, port, soon())
        child = os.fork()
        if not child:
            resolver.answers.set()
            code = 1
            try:
                connect_tcp(NAME, port, time.monotonic() + 10).close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
