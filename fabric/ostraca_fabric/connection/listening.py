"""Listening sockets, and who is at the other end of an accepted one."""

from __future__ import annotations

import asyncio
import socket
import stat
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.wire.address import Address, TcpAddress, TlsAddress, UnixAddress
from ostraca_fabric.wire.handshake import Secured

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

_BACKLOG = 128
_PROBE_S = 1.0
_UCRED = Struct("iII")


def listen(address: Address) -> socket.socket:
    """Return a socket that listens there.

    A unix socket that nobody answers at is left over from a process that died, and is replaced. Two processes
    that start at the same instant can both find it dead: who must be alone holds a lock of its own first.
    Raises ConnectError when another server answers, or the address can't be had.
    """
    try:
        if isinstance(address, UnixAddress):
            _remove_dead(address)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name: str | tuple[str, int] = address.path
        else:
            listening, name = _tcp_socket(address)
        try:
            listening.bind(name)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise ConnectError(f"can't listen at {address}: {error}") from error
    listening.settimeout(0)
    return listening


def check_free(addresses: Iterable[Address]) -> None:
    """Listen at all of these for a moment, for who wants to know early that it can. Raises as ``listen``."""
    with ExitStack() as held:
        for address in addresses:
            held.enter_context(listen(address))
            held.callback(unlink_own, address, file_identity(address))


def real_address(asked: Address, listening: socket.socket) -> Address:
    """Return the address asked for with the port that was given for port 0."""
    if isinstance(asked, UnixAddress):
        return asked
    return replace(asked, port=listening.getsockname()[1])


def file_identity(address: Address) -> tuple[int, int] | None:
    """Tell this unix socket's file from a later one of the same name."""
    if not isinstance(address, UnixAddress):
        return None
    found = Path(address.path).stat()
    return found.st_dev, found.st_ino


def unlink_own(address: Address, identity: tuple[int, int] | None) -> None:
    """Remove the file of a unix socket, unless somebody replaced it."""
    with suppress(FileNotFoundError):
        if isinstance(address, UnixAddress) and file_identity(address) == identity:
            Path(address.path).unlink()


def peer_uid(transport: asyncio.BaseTransport) -> int | None:
    """Return the user at the other end as the kernel knows it, or None where it does not."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        simulated: int | None = transport.get_extra_info("peer_uid")
        return simulated
    if connected.family != socket.AF_UNIX:
        return None
    _, uid, _ = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def secured(transport: asyncio.BaseTransport) -> Secured | None:
    """Return what TLS says of the other end; None where there is no TLS."""
    shown: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    if shown is None:
        return None
    certificate = shown.getpeercert()
    if not certificate:
        return Secured(None)
    names = {str(entry[1]) for entry in certificate.get("subjectAltName", ())}
    subject = certificate.get("subject", ())
    names.update(str(part[1]) for named in subject for part in named if part[0] == "commonName")
    return Secured(frozenset(names))


def _tcp_socket(address: TcpAddress | TlsAddress) -> tuple[socket.socket, tuple[str, int]]:
    family, kind, protocol, _, name = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listening, (str(name[0]), int(name[1]))


def _remove_dead(address: UnixAddress) -> None:
    try:
        mode = Path(address.path).stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{address.path} exists and is no socket: choose another path, or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            Path(address.path).unlink()
            return
        except TimeoutError:
            pass  # somebody's backlog is full, so somebody is there
    raise ConnectError(f"another server answers at {address}: stop it, or choose another address")
