"""Connections to a host by name or address, within a caller's time.

The system's resolver ignores deadlines: without an answering name server a lookup takes half a minute. A
thread looks names up, and callers wait only until their deadline. A slow lookup continues, and the next
caller with the same name waits for it or uses the result.

A host may have several addresses. Each gets an even share of the remaining time, so a silent address leaves
time for the others.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.runtime.threads import show_name

_FRESH_S = 5.0
"""Validity of a lookup's result without a waiting caller."""

_LEAST_S = 0.001

_SocketAddress = tuple[socket.AddressFamily, socket.SocketKind, int, Any]


@dataclass(slots=True)
class _NameLookup:
    """Lookup of a host's addresses."""

    done: threading.Event = field(default_factory=threading.Event)
    found: list[_SocketAddress] = field(default_factory=list)
    error: OSError | None = None
    done_at_s: float = 0.0

    @property
    def is_stale(self) -> bool:
        return self.done.is_set() and time.monotonic() > self.done_at_s + _FRESH_S


_lookups: dict[tuple[str, int], _NameLookup] = {}
"""Running lookups, and lookups that ended without a waiting caller."""

_changing = threading.Lock()


def connect_tcp(host: str, port: int, until_s: float) -> socket.socket:
    """Connect by TCP; the socket's time-out is the remaining time.

    Raises TimeoutError if an address or the name server did not answer in time, and OSError.
    """
    problem: OSError | None = None
    found = _addresses(host, port, until_s)
    for number, (family, kind, protocol, address) in enumerate(found):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            problem = TimeoutError(f"no time was left to try {address[0]}")
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s / (len(found) - number))
            sock.connect(address)
            sock.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        except OSError as error:
            sock.close()
            if not isinstance(problem, TimeoutError):
                problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise problem or ConnectError(f"{host} has no address")


def _addresses(host: str, port: int, until_s: float) -> list[_SocketAddress]:
    """Return a host's addresses, the best first.

    Raises TimeoutError and OSError.
    """
    name = (host, port)
    try:
        return _look_up(*name, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name, not an address
    with _changing:
        lookup = _lookups.get(name)
        if lookup is None or lookup.is_stale:
            lookup = _lookups[name] = _start_lookup(name)
    if not lookup.done.wait(max(0.0, until_s - time.monotonic())):
        raise TimeoutError(f"the name {host} was not resolved in time")
    with _changing:
        if _lookups.get(name) is lookup:
            del _lookups[name]
    if lookup.error is not None:
        raise lookup.error
    return lookup.found


def _start_lookup(name: tuple[str, int]) -> _NameLookup:
    lookup = _NameLookup()

    def look() -> None:
        show_name("names")
        try:
            lookup.found = _look_up(*name)
        except OSError as error:
            lookup.error = error
        finally:
            lookup.done_at_s = time.monotonic()
            lookup.done.set()

    try:
        threading.Thread(target=look, name="ostraca-names", daemon=True).start()
    except RuntimeError as error:
        raise ConnectError(f"{name[0]} can't be looked up: {error}") from error
    return lookup


def _look_up(host: str, port: int, *, flags: int = 0) -> list[_SocketAddress]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


def _forget() -> None:
    """Reset all lookups in a forked process, which has none of the threads."""
    global _changing  # noqa: PLW0603
    _changing = threading.Lock()
    _lookups.clear()


os.register_at_fork(after_in_child=_forget)
