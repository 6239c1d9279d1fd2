"""Dialling: from addresses to a connection with a completed handshake.

Dialling runs in the thread that needs the connection, within that caller's time. Each address gets an even
share of the remaining time, so a silent address can't use up the time of later addresses. The caller learns
the silent addresses.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.credentials import Credentials
from ostraca._connection.resolve import connect_tcp
from ostraca._memory.arena import note_refused
from ostraca._memory.inline_arena import InlineArenaEnd
from ostraca.settings import ClientSettings
from ostraca_fabric.errors import (
    AuthenticationError,
    ConnectError,
    OstracaError,
    ProtocolError,
    UsageError,
    VersionError,
)
from ostraca_fabric.model.limits import described
from ostraca_fabric.ports.transport import ArenaEnd
from ostraca_fabric.runtime.os_errors import state_and_remedy
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.sockets.default_paths import DAEMON_SOCKET, TLS_VARIABLES, agent_socket, default_directory
from ostraca_fabric.sockets.stream import ByteStream, be_watchful, can_be_read
from ostraca_fabric.wire.address import Address, TlsAddress, UnixAddress, parse_address
from ostraca_fabric.wire.codec import HELLO_ANSWER, TO_WORKER
from ostraca_fabric.wire.frames import BulkEnd, FrameReader, Passage, encode
from ostraca_fabric.wire.handshake import WORKER, accepted, hello_for
from ostraca_fabric.wire.messages import Hello, Message, Refused, Welcome, WorkerMemory

if TYPE_CHECKING:
    from ostraca_fabric.sockets.tls import Tls


ADDRESS_VARIABLE = "OSTRACA_AGENT"
WELCOME_BYTES_MAX = 64 << 10
"""Longest frame before the Welcome: a Welcome takes some hundred bytes, a Refused its sentence."""

SIGNALS_S = 0.05
"""Longest sleep of a caller. A signal that comes right before the sleep does not end it, so its handler would
run at the operation's deadline only."""

_NAME_CHARACTERS_MAX = 64
_PROGRESS_S = 0.001
_POLLS_S = 0.0002 if len(os.sched_getaffinity(0)) > 1 else 0.0
"""Time for which an answer is polled for before a sleep: another core may answer in less. A sleep costs 20
microseconds or more, and up to 5 ms beside a busy thread of Python, as it gives the GIL up. Each look yields
the core, which the agent may wait for.
"""
_SEND_BUFFER_BYTES = 1 << 20  # as an agent's ``ConnectionSettings`` say
_KEEPALIVE_IDLE_S = 3
_KEEPALIVE_EVERY_S = 1
_KEEPALIVE_COUNT = 3


@dataclass(frozen=True, slots=True)
class ControlChannel:
    """Connection after its handshake."""

    stream: ByteStream
    reader: FrameReader
    welcome: Welcome
    address: Address

    def ask(
        self, question: Message, *, until_s: float, meanwhile: Callable[[], None] | None = None
    ) -> Message | None:
        """Send a message, and return the next message; None without any by *until_s*.

        *meanwhile* is called in between. For the only user of a connection without arena. Raises OSError for
        a lost connection, else ProtocolError.
        """
        stream = self.stream
        stream.send_first(encode(question), until_s=until_s)
        if meanwhile is not None:
            meanwhile()
        polls_until_s = time.monotonic() + _POLLS_S
        while True:
            answer = self._receive()
            if answer is not None:
                return answer
            now_s = time.monotonic()
            if now_s >= until_s:
                return None
            if now_s < polls_until_s:
                os.sched_yield()
            elif not stream.has_pending:
                can_be_read(stream, until_s=min(until_s, now_s + SIGNALS_S))

    def _receive(self) -> Message | None:
        """Return the next message if it has arrived whole."""
        try:
            count, _ = self.stream.receive(self.reader)
        except BlockingIOError:
            return None
        if not count:
            raise ConnectionResetError("the agent closed the connection")
        for event in self.reader.received(count):
            if isinstance(event, ProtocolError):
                raise event
            if isinstance(event, BulkEnd):
                raise ProtocolError("bulk bytes without arena")
            return TO_WORKER.decode(event)
        return None


class NoAnswerError(ConnectError):
    """Address without an answer or a refusal in time."""


class UnreachableError(ConnectError):
    """No agent could be reached."""

    def __init__(self, message: str, silent: Sequence[Address]) -> None:
        super().__init__(message)
        self.silent = silent
        """Addresses without an answer or a refusal in time."""


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Identity of the dialling client: tenant, credentials, arena ends and id.

    The id stays the same as long as the arena ends exist.
    """

    tenant: str
    credentials: Credentials
    ends: Mapping[str, ArenaEnd]
    client: bytes = b""
    """As in ``Hello``."""

    features: tuple[str, ...] = ()
    """As in ``Hello``."""

    tls: Tls | None = None
    """Trusted CA and certificates for TLS addresses; required there."""

    proof: MemoryProof | None = None
    """Shown to agents at unix sockets, which may then read puts out of this process's memory."""

    def without_arena(self) -> ClientIdentity:
        """Return the identity for a connection beside the client's own, which moves no blocks."""
        return replace(self, ends={}, features=(), proof=None)

    def hello(self, token: str, address: Address) -> Hello:
        """Build the first message of a connection to an address."""
        arenas = tuple(end.offer() for end in self.ends.values() if end.has_offer)
        memory = None
        if self.proof is not None and isinstance(address, UnixAddress):
            memory = WorkerMemory(self.proof.address, self.proof.content)
        return hello_for(
            WORKER,
            self.tenant,
            _program(),
            token,
            self.features,
            arenas=arenas,
            client=self.client,
            memory=memory,
        )


def _program() -> str:
    """Return this process's name for logs of agents.

    An embedded interpreter may have no arguments.
    """
    arguments = getattr(sys, "argv", None) or [""]
    name = Path(str(arguments[0])).name.encode("ascii", errors="replace").decode()
    return f"{name[:_NAME_CHARACTERS_MAX] or 'python'}:{os.getpid()}"


def choose_addresses(
    addresses: str | Sequence[str] | None, environment: Mapping[str, str]
) -> tuple[Address, ...]:
    """Return the addresses to dial: passed, from OSTRACA_AGENT, or the default.

    The variable takes several addresses separated by commas. Raises UsageError for an invalid address, and
    ConnectError without any address.
    """
    if addresses is None:
        addresses = environment.get(ADDRESS_VARIABLE, "").split(",")
    wanted = tuple(parse_address(each.strip()) for each in _parse_list(addresses) if each.strip())
    return wanted or _default_addresses(environment)


def _parse_list(addresses: object) -> list[str]:
    listed = [addresses] if isinstance(addresses, str) else addresses
    if isinstance(listed, (list, tuple)) and all(isinstance(each, str) for each in listed):
        return [str.__str__(each) for each in listed]
    raise UsageError(
        f"addresses is {described(addresses)}: pass an address as a string, or a list of addresses"
    )


def _default_addresses(environment: Mapping[str, str]) -> tuple[Address, ...]:
    """Return the default sockets that exist. Raises ConnectError for none."""
    usual = [DAEMON_SOCKET]
    causes = []
    try:
        usual.append(agent_socket(default_directory(environment), 0))
    except (RuntimeError, KeyError, OSError, OstracaError) as error:  # no HOME, and no such user
        causes.append(f"the socket of `ostraca up` has no usual place: {error}")
    found = []
    for path in usual:
        try:
            if stat.S_ISSOCK(path.stat().st_mode):
                found.append(UnixAddress(str(path)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            causes.append(f"{path} can't be looked at: {error}")
    if not found:
        raise ConnectError(
            f"no address was passed, {ADDRESS_VARIABLE} is not set, and there is no socket at "
            f"{' or '.join(map(str, usual))}{''.join(f' ({each})' for each in causes)}: start a fabric with "
            "`ostraca up` and pass the printed address"
        )
    return tuple(found)


def choose_tls(
    addresses: Sequence[Address], settings: ClientSettings, environment: Mapping[str, str]
) -> Tls | None:
    """Return the trusted CA and certificates for TLS addresses; None without any.

    The environment fills gaps in the settings. Raises UsageError.
    """
    address = next((each for each in addresses if isinstance(each, TlsAddress)), None)
    if address is None:
        return None
    given = (settings.tls_ca, settings.tls_cert, settings.tls_key)
    ca, cert, key = (
        value or environment.get(variable, "") for value, variable in zip(given, TLS_VARIABLES, strict=True)
    )
    if not ca:
        raise UsageError(
            f"{address} requires the CA of agents' certificates: pass its file as tls_ca in the "
            f"settings, or in {TLS_VARIABLES[0]}"
        )
    from ostraca_fabric.sockets.tls import Tls, TlsFiles  # noqa: PLC0415 (a fiftieth of a second, and few use it)

    return Tls(TlsFiles(Path(ca), Path(cert) if cert else None, Path(key) if key else None))


def dial(addresses: Sequence[Address], identity: ClientIdentity, *, until_s: float) -> ControlChannel:
    """Connect to the first agent that welcomes the caller.

    Raises AuthenticationError or VersionError if an agent gave this reason. Raises TokenError if the caller's
    own token can't be read, else UnreachableError with the answer of each address.
    """
    token = identity.credentials.token(until_s)
    problems: list[tuple[Address, OstracaError]] = []
    for number, address in enumerate(addresses):
        left_s = until_s - time.monotonic()
        try:
            return _dial_one(address, identity, token, time.monotonic() + left_s / (len(addresses) - number))
        except (ConnectError, ProtocolError) as error:
            problems.append((address, error))
    summary = "; ".join(f"{address}: {error}" for address, error in problems)
    for _, problem in problems:
        if isinstance(problem, (AuthenticationError, VersionError)):
            raise type(problem)(summary) from problem
    silent = [address for address, problem in problems if isinstance(problem, NoAnswerError)]
    raise UnreachableError(f"no agent could be reached ({summary})", silent) from problems[-1][1]


def say_hello(address: Address, identity: ClientIdentity, *, within_s: float) -> Welcome:
    """Ask the agent at *address* for a welcome, on a connection without an arena that is closed at once.

    Raises as ``dial``.
    """
    channel = dial([address], identity.without_arena(), until_s=time.monotonic() + within_s)
    channel.stream.close()
    return channel.welcome


def _dial_one(address: Address, identity: ClientIdentity, token: str, until_s: float) -> ControlChannel:
    try:
        stream = _open_stream(address, identity, until_s)
    except TimeoutError as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error
    except OSError as error:
        raise ConnectError(state_and_remedy(error)[0]) from error
    try:
        return _shake_hands(stream, identity, token, address, until_s)
    except ConnectionResetError as error:
        stream.close()
        raise ConnectError(stream.closed_message) from error
    except OSError as error:
        stream.close()
        if isinstance(error, ConnectError):
            raise
        raise ConnectError(state_and_remedy(error)[0]) from error
    except BaseException:
        stream.close()
        raise


def _open_stream(address: Address, identity: ClientIdentity, until_s: float) -> ByteStream:
    sock = _connect_socket(address, until_s)
    if not isinstance(address, TlsAddress):
        return ByteStream(sock)
    from ostraca._connection.tls_stream import TlsStream  # noqa: PLC0415 (as above)

    assert identity.tls is not None, "TLS addresses come with a CA"
    try:
        return TlsStream.connect(sock, identity.tls, address.host, until_s=until_s)
    except BaseException:
        sock.close()
        raise


def _connect_socket(address: Address, until_s: float) -> socket.socket:
    timeout_s = until_s - time.monotonic()
    if timeout_s <= 0:
        raise TimeoutError("no time was left for this address")
    if isinstance(address, UnixAddress):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = connect_tcp(address.host, address.port, until_s)
    # An agent's host that went dark must not look alive for the kernel's quarter of an hour.
    be_watchful(
        sock,
        idle_s=_KEEPALIVE_IDLE_S,
        every_s=_KEEPALIVE_EVERY_S,
        asked_max=_KEEPALIVE_COUNT,
        lost_after_s=_KEEPALIVE_IDLE_S + _KEEPALIVE_EVERY_S * _KEEPALIVE_COUNT,
    )
    return sock


def _shake_hands(
    stream: ByteStream, identity: ClientIdentity, token: str, address: Address, until_s: float
) -> ControlChannel:
    inline = identity.ends.get(InlineArenaEnd.name)
    sink = inline.sink if isinstance(inline, InlineArenaEnd) else _refuse_bulk
    reader = FrameReader(sink, frame_bytes_max=WELCOME_BYTES_MAX)
    hello = identity.hello(token, address)
    stream.send_first(encode(hello), until_s=until_s)
    welcome = accepted(hello, _receive_welcome(stream, reader, identity, until_s))
    reader.frame_bytes_max = welcome.limits.frame_bytes_max
    note_refused(address, [each.transport for each in hello.arenas], welcome.transport)
    return ControlChannel(stream, reader, welcome, address)


def _receive_welcome(
    stream: ByteStream, reader: FrameReader, identity: ClientIdentity, until_s: float
) -> Welcome | Refused:
    """Wait for the answer to Hello, letting transports make progress.

    The passive side of a transport takes part in connecting.
    """
    active = [end for end in identity.ends.values() if end.needs_progress]
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise NoAnswerError("no answer to Hello in time: check whether an agent runs there")
        for end in active:
            end.progress()
        if not (stream.has_pending or poll.poll(1000 * (_PROGRESS_S if active else left_s))):
            continue
        try:
            count, _ = stream.receive(reader)
        except BlockingIOError:
            continue
        if not count:
            raise ConnectError(stream.closed_message)
        for event in reader.received(count):
            if isinstance(event, ProtocolError):
                raise event
            if isinstance(event, BulkEnd):
                raise ProtocolError("bulk bytes before the handshake was done")
            return HELLO_ANSWER.decode(event)


def _refuse_bulk(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
    """Refuse inline blocks, as no inline arena was offered."""
    raise ProtocolError(
        f"{int(lengths.sum())} bytes of {len(places)} blocks of transfer {transfer}, "
        "and no inline arena was offered"
    )
