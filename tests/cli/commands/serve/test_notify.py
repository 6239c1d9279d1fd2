"""What the service manager is told."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostraca_cli.commands.serve.notify import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        yield listening


def heard(manager: socket.socket) -> str:
    return manager.recv(4096).decode()


def test_states_are_told_in_the_managers_words(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready("I serve")
    notifier.stopping("I drain")
    assert heard(manager) == "READY=1\nSTATUS=I serve"
    assert heard(manager) == "STOPPING=1\nSTATUS=I drain"


def test_a_socket_may_have_an_abstract_name() -> None:
    name = f"ostraca-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(10)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready("I serve")
        assert heard(manager) == "READY=1\nSTATUS=I serve"


async def test_the_watchdog_hears_from_the_loop_as_long_as_it_runs(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"})
    async with notifier.watched():
        for _ in range(3):
            assert await asyncio.to_thread(heard, manager) == "WATCHDOG=1"
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing pings any more"


async def test_while_a_daemon_is_busy_the_manager_hears_with_what_and_has_patience(
    manager: socket.socket,
) -> None:
    notifier, doing = Notifier({"NOTIFY_SOCKET": manager.getsockname()}), ["I wait\nfor etcd"]
    async with notifier.busy(lambda: doing[0]):
        assert await asyncio.to_thread(heard, manager) == (
            "STATUS=I wait for etcd\nEXTEND_TIMEOUT_USEC=30000000"
        )
        doing[0] = "I look for drives"
        assert "STATUS=I look for drives\n" in await asyncio.to_thread(heard, manager)
    async with notifier.busy(lambda: "I drain", within_s=1.5):
        left_us = [int((await asyncio.to_thread(heard, manager)).rpartition("=")[2]) for _ in range(2)]
        assert 0 < left_us[1] < 600_000 < left_us[0] <= 1_500_000, "no longer than was said"
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is told any more"


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_a_watchdog_of_another_process_is_none_of_ours(
    environment: dict[str, str], watchdog_s: float
) -> None:
    assert Notifier(environment).watchdog_s == watchdog_s


async def test_without_a_manager_nothing_is_told() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    notifier.ready("I serve")
    async with notifier.watched():
        pass


def test_a_manager_that_is_gone_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")})
    with caplog.at_level(logging.WARNING):
        notifier.ready("I serve")
        notifier.stopping("I drain")
    assert len(caplog.records) == 1
