"""Connecting to a host by its name or address, within a caller's time.

The system's resolver keeps to nobody's time: where no name server answers it takes half a minute. So a name
is looked up in a thread, and who dials waits for it no longer than it has. A look-up that takes longer goes
on, and the next who wants the same name waits for that one, or finds its answer.

A host may have several addresses. Each gets an even share of what is left, so that one from which nothing
comes back leaves some for the others.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.threads import show_name

_FRESH_S = 5.0
"""The answer of a look-up that nobody waited for is good for so long."""

_LEAST_S = 0.001

_Found = tuple[socket.AddressFamily, socket.SocketKind, int, Any]


@dataclass(slots=True)
class _LookUp:
    """One look-up of a host's addresses."""

    done: threading.Event = field(default_factory=threading.Event)
    found: list[_Found] = field(default_factory=list)
    error: OSError | None = None
    done_at_s: float = 0.0

    @property
    def is_stale(self) -> bool:
        return self.done.is_set() and time.monotonic() > self.done_at_s + _FRESH_S


_look_ups: dict[tuple[str, int], _LookUp] = {}
"""Those under way, and those that ended with nobody waiting."""

_changing = threading.Lock()


def connected(host: str, port: int, until_s: float) -> socket.socket:
    """Connect by TCP. The socket's time-out is what is left of the time.

    Raises TimeoutError when an address, or whoever knows the name, did not answer in its time, and OSError.
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


def _addresses(host: str, port: int, until_s: float) -> list[_Found]:
    """Return a host's addresses, the best first. Raises TimeoutError and OSError."""
    name = (host, port)
    try:
        return _looked_up(*name, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # it is a name
    with _changing:
        look_up = _look_ups.get(name)
        if look_up is None or look_up.is_stale:
            look_up = _look_ups[name] = _begun(name)
    if not look_up.done.wait(max(0.0, until_s - time.monotonic())):
        raise TimeoutError(f"the name {host} was not resolved in time")
    with _changing:
        if _look_ups.get(name) is look_up:
            del _look_ups[name]
    if look_up.error is not None:
        raise look_up.error
    return look_up.found


def _begun(name: tuple[str, int]) -> _LookUp:
    look_up = _LookUp()

    def look() -> None:
        show_name("names")
        try:
            look_up.found = _looked_up(*name)
        except OSError as error:
            look_up.error = error
        finally:
            look_up.done_at_s = time.monotonic()
            look_up.done.set()

    try:
        threading.Thread(target=look, name="ostraca-names", daemon=True).start()
    except RuntimeError as error:
        raise ConnectError(f"{name[0]} can't be looked up: {error}") from error
    return look_up


def _looked_up(host: str, port: int, *, flags: int = 0) -> list[_Found]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise ConnectError(f"{host} can be no host's name: {error}") from error
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


def _forget() -> None:
    """Begin anew in a forked process: it has none of the threads."""
    global _changing  # noqa: PLW0603
    _changing = threading.Lock()
    _look_ups.clear()


os.register_at_fork(after_in_child=_forget)
