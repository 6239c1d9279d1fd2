"""Dialling: from addresses to a connection whose handshake is done.

It runs in the thread that needs the connection and keeps to that caller's time. Each address gets an even
share of what is left, so one that does not answer can't use up the time of those after it, and who dials is
told which these were.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.hosts import connected
from ostraca.line import PlainLine
from ostraca.places import DAEMON_SOCKET, TLS_VARIABLES, agent_socket, default_directory
from ostraca_fabric.adapters.inline_arena import InlineArenaEnd
from ostraca_fabric.errors import (
    AuthenticationError,
    ConnectError,
    OstracaError,
    ProtocolError,
    UsageError,
    VersionError,
)
from ostraca_fabric.tcp import be_watchful
from ostraca_fabric.wire.address import TlsAddress, UnixAddress, parse_address
from ostraca_fabric.wire.codec import HELLO_ANSWER
from ostraca_fabric.wire.frames import BulkEnd, FrameReader, encode
from ostraca_fabric.wire.handshake import WORKER, WorkerHandshake

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ostraca.line import Line
    from ostraca.settings import ClientSettings
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.tls import Tls
    from ostraca_fabric.wire.address import Address
    from ostraca_fabric.wire.messages import Refused, Welcome
    from ostraca_fabric.wire.passage import Passage

ADDRESS_VARIABLE = "OSTRACA_AGENT"
WELCOME_BYTES_MAX = 64 << 10
"""Longest frame before the Welcome: a Welcome takes some hundred bytes, a Refused its sentence."""

_PROGRESS_S = 0.001
_SEND_BUFFER_BYTES = 1 << 20  # as an agent's ``ConnectionSettings`` say
_KEEPALIVE_IDLE_S = 3
_KEEPALIVE_EVERY_S = 1
_KEEPALIVE_COUNT = 3


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection after its handshake."""

    line: Line
    reader: FrameReader
    welcome: Welcome
    address: Address


class NoAnswerError(ConnectError):
    """An address neither answered nor refused in its time."""


class UnreachableError(ConnectError):
    """No agent could be reached."""

    def __init__(self, message: str, silent: Sequence[Address]) -> None:
        super().__init__(message)
        self.silent = silent
        """The addresses that neither answered nor refused in their time."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dials: its tenant, its token, its arena's ends and the id it keeps for as long as it has them.

    The token is empty on a unix socket where peer credentials suffice.
    """

    tenant: str
    token: str
    ends: Mapping[str, ArenaEnd]
    client: bytes = b""
    """As in ``Hello``."""

    features: tuple[str, ...] = ()
    """As in ``Hello``."""

    tls: Tls | None = None
    """Whom to believe at addresses of TLS, which are dialled with it alone."""

    def handshake(self) -> WorkerHandshake:
        """Return what to say first."""
        name = f"{Path(sys.argv[0]).name or 'python'}:{os.getpid()}"
        arenas = tuple(end.offer() for end in self.ends.values())
        return WorkerHandshake(
            WORKER, self.tenant, name, self.token, self.features, arenas=arenas, client=self.client
        )


def chosen_addresses(
    addresses: str | Sequence[str] | None, environment: Mapping[str, str]
) -> tuple[Address, ...]:
    """Return where to dial: what was passed, else what OSTRACA_AGENT names, else the usual sockets.

    The variable takes several addresses with commas between.

    Raises UsageError for what is no address, and ConnectError when there is nowhere to dial.
    """
    if addresses is None:
        addresses = environment.get(ADDRESS_VARIABLE, "").split(",")
    listed = [addresses] if isinstance(addresses, str) else list(addresses)
    wanted = tuple(parse_address(each.strip()) for each in listed if each.strip())
    if wanted:
        return wanted
    usual = (DAEMON_SOCKET, agent_socket(default_directory(environment), 0))
    found = tuple(UnixAddress(str(path)) for path in usual if path.is_socket())
    if not found:
        raise ConnectError(
            f"no address was passed, {ADDRESS_VARIABLE} is not set, and there is no socket at "
            f"{' or '.join(map(str, usual))}: start a fabric with `ostraca up` and pass the address it prints"
        )
    return found


def chosen_tls(
    addresses: Sequence[Address], settings: ClientSettings, environment: Mapping[str, str]
) -> Tls | None:
    """Return whom to believe at addresses of TLS; None where there are none.

    What the settings leave out the environment says. Raises UsageError.
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
            f"{address} takes the CA that signs agents' certificates: give its file as tls_ca in the "
            f"settings, or in {TLS_VARIABLES[0]}"
        )
    from ostraca_fabric.tls import Tls, TlsFiles  # noqa: PLC0415 (a fiftieth of a second, and few use it)

    return Tls(TlsFiles(Path(ca), Path(cert) if cert else None, Path(key) if key else None))


def dial(addresses: Sequence[Address], caller: Caller, *, until_s: float) -> Dialled:
    """Connect to the first agent that welcomes the caller.

    Raises AuthenticationError or VersionError when one of the agents gave that reason, else UnreachableError
    with what each address answered.
    """
    problems: list[tuple[Address, OstracaError]] = []
    for number, address in enumerate(addresses):
        left_s = until_s - time.monotonic()
        try:
            return _dial_one(address, caller, time.monotonic() + left_s / (len(addresses) - number))
        except (ConnectError, ProtocolError) as error:
            problems.append((address, error))
    summary = "; ".join(f"{address}: {error}" for address, error in problems)
    for _, problem in problems:
        if isinstance(problem, (AuthenticationError, VersionError)):
            raise type(problem)(summary) from problem
    silent = [address for address, problem in problems if isinstance(problem, NoAnswerError)]
    raise UnreachableError(f"no agent could be reached ({summary})", silent) from problems[-1][1]


def _dial_one(address: Address, caller: Caller, until_s: float) -> Dialled:
    try:
        line = _line(address, caller, until_s)
    except TimeoutError as error:
        raise NoAnswerError(str(error) or type(error).__name__) from error
    except OSError as error:
        raise ConnectError(str(error) or type(error).__name__) from error
    try:
        return _shake_hands(line, caller, address, until_s)
    except ConnectionResetError as error:
        line.close()
        raise ConnectError(line.hung_up) from error
    except OSError as error:
        line.close()
        raise (error if isinstance(error, ConnectError) else ConnectError(str(error))) from error
    except BaseException:
        line.close()
        raise


def _line(address: Address, caller: Caller, until_s: float) -> Line:
    sock = _connected(address, until_s)
    if not isinstance(address, TlsAddress):
        return PlainLine(sock)
    from ostraca.tls_line import TlsLine  # noqa: PLC0415 (as above)

    assert caller.tls is not None, "whoever dials TLS has said whom to believe"
    try:
        return TlsLine.shaken(sock, caller.tls, address.host, until_s=until_s)
    except BaseException:
        sock.close()
        raise


def _connected(address: Address, until_s: float) -> socket.socket:
    timeout_s = until_s - time.monotonic()
    if timeout_s <= 0:
        raise TimeoutError("no time was left to try it")
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
    sock = connected(address.host, address.port, until_s)
    # An agent's host that went dark must not look alive for the kernel's quarter of an hour.
    be_watchful(
        sock,
        idle_s=_KEEPALIVE_IDLE_S,
        every_s=_KEEPALIVE_EVERY_S,
        asked_max=_KEEPALIVE_COUNT,
        lost_after_s=_KEEPALIVE_IDLE_S + _KEEPALIVE_EVERY_S * _KEEPALIVE_COUNT,
    )
    return sock


def _shake_hands(line: Line, caller: Caller, address: Address, until_s: float) -> Dialled:
    inline = caller.ends.get(InlineArenaEnd.name)
    sink = inline.sink if isinstance(inline, InlineArenaEnd) else _refuse_bulk
    reader = FrameReader(sink, frame_bytes_max=WELCOME_BYTES_MAX)
    handshake = caller.handshake()
    line.say(encode(handshake.hello), until_s=until_s)
    welcome = handshake.accept(_first_message(line, reader, caller, until_s))
    reader.frame_bytes_max = welcome.limits.frame_bytes_max
    return Dialled(line, reader, welcome, address)


def _first_message(line: Line, reader: FrameReader, caller: Caller, until_s: float) -> Welcome | Refused:
    """Wait for the answer to Hello, letting transports make progress.

    Their passive side takes part in connecting.
    """
    active = [end for end in caller.ends.values() if end.needs_progress]
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise NoAnswerError("no answer to Hello in time; is it stopped, or no agent?")
        for end in active:
            end.progress()
        if not (line.has_pending or poll.poll(1000 * (_PROGRESS_S if active else left_s))):
            continue
        try:
            count, _ = line.receive(reader)
        except BlockingIOError:
            continue
        if not count:
            raise ConnectError(line.hung_up)
        for event in reader.received(count):
            if isinstance(event, ProtocolError):
                raise event
            if isinstance(event, BulkEnd):
                raise ProtocolError("bulk bytes before the handshake was done")
            return HELLO_ANSWER.decode(event)


def _refuse_bulk(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
    """Take no blocks inline: no such arena was offered."""
    raise ProtocolError(
        f"{int(lengths.sum())} bytes of {len(places)} blocks of transfer {transfer}, "
        "and no inline arena was offered"
    )


def checked_token(token: object) -> str:
    """Return the token to show. Raises UsageError."""
    if token is None:
        return ""
    if not isinstance(token, str) or not token:
        raise UsageError(
            "credentials is a token as a string, or None where a unix socket's peer credentials suffice"
        )
    return token
