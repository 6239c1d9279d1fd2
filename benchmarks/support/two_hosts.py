"""Two connected network namespaces in the role of two hosts. Requires root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ADDRESSES = ("192.0.2.1", "192.0.2.2")  # TEST-NET-1: nobody's


@dataclass(frozen=True, slots=True)
class Host:
    """Namespace and its address on the link."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of commands to run in the namespace."""
        return ("ip", "netns", "exec", self.name)


def unavailable_reason() -> str:
    """Return the reason against namespaces here; empty if possible."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return "" if shutil.which("ip") else "ip (iproute2) not found"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Create both hosts, and remove them afterwards. Raises ConnectError on failure."""
    mark = secrets.token_hex(3)
    hosts = tuple(Host(f"ostraca-{mark}-{side}", address) for side, address in enumerate(_ADDRESSES))
    with contextlib.ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.name)
            undo.callback(_ip, "netns", "delete", host.name)
        first, second = hosts
        _ip(
            "link", "add", "cable", "netns", first.name, "type", "veth", "peer", "cable", "netns", second.name
        )
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", host.name, "link", "set", device, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConnectError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
