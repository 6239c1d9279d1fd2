"""Faults between the user-space initiator and its target: neither end crashes, and no write lands late."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.drives.drive_contract import at_page, pages, read, written
from tests.support.nvme_tcp.tcp_target import TcpTarget, free_controller

from ostraca_dpu_agent.adapters.nvme_tcp.association import TcpPathSettings
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_drive import TcpDrive
from ostraca_dpu_agent.adapters.nvme_tcp.tcp_paths import TcpPaths
from ostraca_enclosure.adapters.nvme_tcp.served_file import ServedFile
from ostraca_enclosure.adapters.nvme_tcp.subsystem import boot_s
from ostraca_enclosure.plan import Export
from ostraca_fabric.model.ids import DriveId
from ostraca_fabric.model.target import Target
from ostraca_fabric.ports.paths import PathError
from ostraca_fabric.sockets.nvme_tcp.commands import Connect, IoOpcode, NvmeStatus, block_command
from ostraca_fabric.sockets.nvme_tcp.identities import NamespaceIdentity
from ostraca_fabric.sockets.nvme_tcp.pdus import (
    LAST,
    DataPart,
    InitRequest,
    InitResponse,
    PduType,
    command_pdu,
    data_header,
)

NQN, HOST = "nqn.2025-01.io.ostraca:shelf", "nqn.2025-01.io.ostraca:host"
NGUID = "0f" * 16
DRIVE_BYTES = 8 << 20
HOST_ID = uuid.UUID(int=7)
QUICK = TcpPathSettings(keep_alive_s=1.0, io_timeout_s=0.5, connect_s=1.0)


class MovedClock:
    """The target's clock; a test moves it on, as a suspended machine does."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return boot_s() + self.ahead_s


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def target(tmp_path: Path, clock: MovedClock) -> Iterator[TcpTarget]:
    made = TcpTarget(tmp_path, NQN, {NGUID: DRIVE_BYTES}, clock=clock)
    yield made
    made.stop()


class RawHost:
    """A host that sends what a test wants: an admin connection and an I/O connection."""

    def __init__(self, target: TcpTarget) -> None:
        self._address = (target.controller.address, target.controller.service)
        self.admin = self._connected()
        number = self._admitted(self.admin, 0, 0xFFFF)
        self.io = self._connected()
        self._admitted(self.io, 1, number)

    def write(self, page: int, data: bytes) -> DataPart:
        """Begin a write; return what the target asks for."""
        command = block_command(IoOpcode.WRITE, 1, page, len(data) // 4096, len(data))
        self.io.sendall(command_pdu(command.encode()))
        question = received(self.io, 24)
        assert question[0] == PduType.READY
        return DataPart.parse(question[8:])

    def send_data(self, part: DataPart, data: bytes) -> None:
        self.io.sendall(data_header(PduType.HOST_DATA, part, flags=LAST) + data)

    def close(self) -> None:
        self.admin.close()
        self.io.close()

    def _connected(self) -> socket.socket:
        made = socket.create_connection(self._address, 10)
        made.sendall(InitRequest().encode())
        assert received(made, 128)[0] == PduType.INIT_RESPONSE
        return made

    def _admitted(self, sock: socket.socket, queue: int, controller: int) -> int:
        wanted = Connect(NQN, HOST, HOST_ID.bytes, queue, controller, 32, 1000)
        sock.sendall(command_pdu(wanted.command(0).encode(), wanted.data()))
        answer = received(sock, 24)
        assert answer[22:] == bytes(2), "the target accepts"
        return int.from_bytes(answer[8:10], "little")


def received(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def ended(sock: socket.socket) -> bool:
    """Wait for the other end's close."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(0.01)


def content(target: TcpTarget, page: int) -> bytes:
    with target.files[NGUID].open("rb") as file:
        file.seek(page * 4096)
        return file.read(4096)


def test_data_that_come_in_time_are_written(target: TcpTarget) -> None:
    host = RawHost(target)
    data = random.Random(1).randbytes(4096)
    host.send_data(host.write(3, data), data)
    assert received(host.io, 24)[22:] == bytes(2)
    assert content(target, 3) == data
    host.close()


def test_data_later_than_twice_the_keep_alive_time_never_reach_the_drive(
    target: TcpTarget, clock: MovedClock
) -> None:
    host = RawHost(target)
    data = random.Random(2).randbytes(4096)
    part = host.write(3, data)
    clock.ahead_s = 2.5  # the target was stopped, and the data have long been in its socket
    host.send_data(part, data)
    assert ended(host.io)
    assert content(target, 3) == bytes(4096)
    host.close()


def test_half_of_a_write_s_data_never_reach_the_drive(target: TcpTarget) -> None:
    host = RawHost(target)
    part = host.write(3, bytes(8192))
    half = DataPart(part.command, part.tag, 0, 4096)
    host.io.sendall(data_header(PduType.HOST_DATA, half) + b"x" * 4096)
    host.close()
    eventually(lambda: target.subsystem.connections == 0)
    assert content(target, 3) == bytes(4096)


def test_a_silent_host_loses_its_connections(target: TcpTarget, clock: MovedClock) -> None:
    host = RawHost(target)
    assert target.subsystem.connections == 2
    clock.ahead_s = 2.5
    assert ended(host.admin)
    assert ended(host.io)
    eventually(lambda: target.subsystem.connections == 0)
    host.close()


def test_connections_beyond_the_limit_are_closed(target: TcpTarget) -> None:
    target.server._connections_max = 2
    host = RawHost(target)
    third = socket.create_connection((target.controller.address, target.controller.service), 10)
    assert ended(third)
    third.close()
    host.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    noise=st.binary(max_size=300),
    kind=st.sampled_from(list(PduType)),
    cut=st.integers(0, 128),
    stage=st.integers(0, 2),
    total=st.integers(0, 0xFFFFFFFF),
)
def test_no_bytes_of_a_host_disturb_the_target_or_another_host(
    target: TcpTarget, noise: bytes, kind: PduType, cut: int, stage: int, total: int
) -> None:
    host = RawHost(target)
    sock = (host.admin, host.io)[stage % 2] if stage else host._connected()
    begun = bytes((kind, 0, 24, 24)) + total.to_bytes(4, "little") + noise
    sock.sendall(begun[: cut + len(noise) // 2])
    sock.shutdown(socket.SHUT_WR)
    assert ended(sock)
    sock.close()
    host.close()
    eventually(lambda: target.subsystem.connections == 0)
    other = RawHost(target)
    other.send_data(other.write(1, bytes(4096)), bytes(4096))
    assert received(other.io, 24)[22:] == bytes(2)
    other.close()
    eventually(lambda: target.subsystem.connections == 0)


class NonsenseTarget:
    """A target that greets, and then answers each connection with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.controller = free_controller()
        self._answer = answer
        self._listener = socket.create_server((self.controller.address, self.controller.service))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    received(sock, 128)
                    sock.sendall(InitResponse().encode() + self._answer)
                    sock.shutdown(socket.SHUT_WR)
                    ended(sock)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@settings(deadline=None, max_examples=40)
@given(
    noise=st.binary(max_size=300),
    kind=st.sampled_from(list(PduType)),
    status=st.sampled_from([0, NvmeStatus.INVALID_FIELD, NvmeStatus.CONNECT_PARAMETERS]),
    is_admitted=st.booleans(),
)
def test_no_bytes_of_a_target_do_more_than_fail_the_connection(
    noise: bytes, kind: PduType, status: int, *, is_admitted: bool
) -> None:
    admitted = bytes.fromhex("0500180018000000") + bytes(14) + (status << 1).to_bytes(2, "little")
    wrong = bytes((kind, 0, 24, 24)) + (24 + len(noise)).to_bytes(4, "little") + noise
    false = NonsenseTarget((admitted if is_admitted else b"") + wrong)

    async def connect() -> None:
        paths = TcpPaths(HOST, str(HOST_ID), QUICK)
        with pytest.raises(PathError, match=str(false.controller)):
            await paths.connect(Target(NQN, (false.controller,)), "")
        paths.close()

    asyncio.run(connect())
    false.close()


class Partition:
    """A network between host and target that may hold back what the host sends from its first data on."""

    BEFORE_DATA = 128 + 72 + 1024 + 72
    """Handshake, Connect and one command."""

    def __init__(self, target: TcpTarget) -> None:
        self.controller = free_controller()
        self.holds = threading.Event()
        self.is_mended = threading.Event()
        self._target = (target.controller.address, target.controller.service)
        self._listener = socket.create_server((self.controller.address, self.controller.service))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self.is_mended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                host, _ = self._listener.accept()
                target = socket.create_connection(self._target, 10)
                self._sockets += [host, target]
                for source, sink, is_held in ((host, target, number > 0), (target, host, False)):
                    thread = threading.Thread(target=self._carry, args=(source, sink, is_held), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_held: bool) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_held and carried >= self.BEFORE_DATA:
                    self.holds.set()
                    self.is_mended.wait(20)
                sink.sendall(data)
                carried += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


async def test_data_held_back_by_a_partition_do_not_land_once_it_is_mended(
    target: TcpTarget, clock: MovedClock
) -> None:
    between = Partition(target)
    paths = TcpPaths(HOST, str(HOST_ID), QUICK)
    await paths.connect(Target(NQN, (between.controller,)), "")
    drive = TcpDrive(DriveId("e/d"), paths.path_to(NQN, NGUID))
    under_way = drive.submit_write(at_page(pages(1, b"l"), 0))
    assert await asyncio.to_thread(between.holds.wait, 10), "the data are on their way"
    assert (await under_way).tolist() == [False], "the host gives the write up"
    clock.ahead_s = 2.5
    between.is_mended.set()
    eventually(lambda: target.subsystem.connections <= 1)  # the I/O connection has ended
    assert content(target, 0) == bytes(4096)
    drive.close()
    paths.close()
    await asyncio.to_thread(between.close)


class _Host:
    """An agent's side: paths and a drive."""

    def __init__(self, target: TcpTarget, paths: TcpPaths) -> None:
        self.target = Target(NQN, (target.controller,))
        self.paths = paths
        self.drive = TcpDrive(DriveId("e/d"), paths.path_to(NQN, NGUID))


async def connected(target: TcpTarget, limits: TcpPathSettings = QUICK) -> _Host:
    paths = TcpPaths(HOST, str(HOST_ID), limits)
    await paths.connect(Target(NQN, (target.controller,)), "")
    return _Host(target, paths)


async def test_a_target_that_starts_again_is_used_by_the_same_drive(target: TcpTarget) -> None:
    host = await connected(target)
    source, into = pages(4, b"r"), pages(4)
    assert await written(host.drive, at_page(source, 0)) == [True]
    target.stop()
    assert await written(host.drive, at_page(source, 8)) == [False]
    assert await read(host.drive, at_page(into, 0)) == [False]
    assert await host.drive.submit_flush() is False
    assert await host.drive.submit_look() is None
    target.start()
    await host.paths.connect(host.target, "")
    assert await read(host.drive, at_page(into, 0)) == [True]
    assert np.array_equal(into, source)
    assert await host.drive.submit_look() == ""
    host.drive.close()
    host.paths.close()


async def test_a_target_killed_during_writes_fails_them_and_tears_none_that_was_acknowledged(
    target: TcpTarget,
) -> None:
    host = await connected(target, TcpPathSettings(io_timeout_s=10.0))
    sources = [pages(64, bytes([number])) for number in range(24)]
    under_way = [host.drive.submit_write(at_page(each, 64 * n)) for n, each in enumerate(sources)]
    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    target.stop()
    ends = [bool((await each)[0]) for each in under_way]
    assert True in ends
    target.start()
    await host.paths.connect(host.target, "")
    for number, (source, is_good) in enumerate(zip(sources, ends, strict=True)):
        if is_good:
            into = pages(64)
            assert await read(host.drive, at_page(into, 64 * number)) == [True]
            assert np.array_equal(into, source)
    host.drive.close()
    host.paths.close()


class HungDisk:
    """A file of the target whose next command hangs until ``mend``."""

    def __init__(self, target: TcpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self._is_mended = threading.Event(), threading.Event()
        file = target.subsystem.files[1]
        used = file.used

        def hang() -> AbstractContextManager[int]:
            self.hangs.set()
            self._is_mended.wait(30)
            return used()

        self._patch = monkeypatch
        monkeypatch.setattr(ServedFile, "used", lambda _: hang())

    def mend(self) -> None:
        self._patch.undo()
        self._is_mended.set()


async def test_a_silent_target_fails_operations_in_time_and_gets_nothing_more_of_them(
    target: TcpTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await connected(target)
    disk = HungDisk(target, monkeypatch)
    began_s = time.monotonic()
    assert await written(host.drive, at_page(pages(4, b"h"), 0)) == [False]
    assert time.monotonic() - began_s < 10
    disk.mend()
    # The connection was reset, and another carries on.
    source, into = pages(4, b"n"), pages(4)
    assert await written(host.drive, at_page(source, 16)) == [True]
    assert await read(host.drive, at_page(into, 16)) == [True]
    assert np.array_equal(into, source)
    host.drive.close()
    host.paths.close()


async def test_a_file_cut_short_fails_the_reads_beyond_its_end(target: TcpTarget) -> None:
    host = await connected(target)
    with target.files[NGUID].open("r+b") as file:
        file.truncate(4 * 4096)
    assert await read(host.drive, at_page(pages(1), 3)) == [True]
    assert await read(host.drive, at_page(pages(1), 4)) == [False]
    assert await read(host.drive, at_page(pages(1), 0)) == [True], "the connection goes on"
    host.drive.close()
    host.paths.close()


async def test_a_withdrawn_drive_fails_and_its_number_is_no_other_drive(target: TcpTarget) -> None:
    host = await connected(target)
    assert await written(host.drive, at_page(pages(1, b"a"), 0)) == [True]
    export = target.subsystem.files[1].export
    target.subsystem.remove(1)
    assert await written(host.drive, at_page(pages(1, b"b"), 0)) == [False]
    target.subsystem.add(export)
    assert await written(host.drive, at_page(pages(1, b"c"), 0)) == [False], "it has another number now"
    await host.paths.connect(host.target, "")
    assert await written(host.drive, at_page(pages(1, b"c"), 0)) == [True]
    host.drive.close()
    host.paths.close()


class WithdrawnOnceListed(dict[int, ServedFile]):
    """Drives of a target, one of which is withdrawn right behind a listing."""

    def __init__(self, target: TcpTarget, number: int) -> None:
        super().__init__(target.subsystem.files)
        self._withdraw = partial(target.subsystem.remove, number)

    def __iter__(self) -> Iterator[int]:
        listed = list(super().__iter__())
        self._withdraw()
        return iter(listed)


async def test_a_drive_withdrawn_during_a_listing_ends_no_path_to_the_others(
    target: TcpTarget, tmp_path: Path
) -> None:
    other = tmp_path / "other.img"
    other.write_bytes(bytes(DRIVE_BYTES))
    target.subsystem.add(Export("0e" * 16, str(other)))
    host = await connected(target)
    target.subsystem.files = WithdrawnOnceListed(target, 2)
    assert [each.nguid for each in await host.paths.connect(host.target, "")] == [NGUID]
    assert await written(host.drive, at_page(pages(1, b"a"), 0)) == [True]
    host.drive.close()
    host.paths.close()


async def test_a_drive_of_an_unusable_format_ends_no_path_to_the_others(
    target: TcpTarget, tmp_path: Path
) -> None:
    host = await connected(target)
    other = tmp_path / "other.img"
    other.write_bytes(bytes(DRIVE_BYTES))
    target.subsystem.add(Export("0e" * 16, str(other)))
    target.subsystem.files[2].identity = NamespaceIdentity("0e" * 16, DRIVE_BYTES >> 14, 1 << 14)
    for paths in (host.paths, TcpPaths(HOST, str(HOST_ID), QUICK)):
        assert [each.nguid for each in await paths.connect(host.target, "")] == [NGUID]
    assert await written(host.drive, at_page(pages(1, b"a"), 0)) == [True]
    host.drive.close()
    host.paths.close()
    paths.close()


async def test_a_hung_disk_does_not_keep_the_target_from_its_end(
    target: TcpTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await connected(target)
    disk = HungDisk(target, monkeypatch)
    under_way = host.drive.submit_write(at_page(pages(1), 0))
    assert await asyncio.to_thread(disk.hangs.wait, 10)
    began_s = time.monotonic()
    await asyncio.to_thread(target.stop)
    assert time.monotonic() - began_s < 15
    assert (await under_way).tolist() == [False]
    disk.mend()
    host.drive.close()
    host.paths.close()
