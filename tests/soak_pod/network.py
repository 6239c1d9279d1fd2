"""Hosts of a pod on one machine: network namespaces on a switch, and links between them that are cut.

It takes root and the programs of iproute2 and util-linux, nothing else. A host's namespace lives as long as
a process that waits in it, which ends when this one does, however it ends: nothing has a name that would be
left behind. Links are cut as a broken switch cuts them, without a word to either end and one way at a time:
the sender comes to believe in a neighbour that is not there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.etcd.nodes import Place

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

SUBNET = "192.0.2"
"""Set aside for documentation: nobody else has it."""

OPERATOR = 254
"""The last number of the address of this process itself."""

NOBODY = "02:00:00:00:ff:ff"
READY_S = 10.0


def enter_own() -> str | None:
    """Take this thread, and all that it begins from now on, to a network of its own.

    Return why that can't be done here, None when it is done.
    """
    if os.geteuid() != 0:
        return "it takes root"
    lacking = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if lacking:
        return f"no {' nor '.join(lacking)} here"
    if _libc.unshare(_CLONE_NEWNET) != 0:
        return f"no network namespaces here: {os.strerror(ctypes.get_errno())}"
    _run("ip", "link", "set", "lo", "up")
    made = subprocess.run(
        ["ip", "link", "add", "switch", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"no bridges here: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True)
class Entering:
    """Takes a process to a host. Call it before the process has another thread."""

    namespace: str

    def __call__(self) -> None:
        """Go there."""
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            assert _libc.setns(descriptor, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        finally:
            os.close(descriptor)


class Host:
    """One host of a network."""

    def __init__(self, number: int) -> None:
        """Have a namespace for it, and a link to the switch in this process's own."""
        self.number = number
        self.address = f"{SUBNET}.{number}"
        self._holder = subprocess.Popen(
            [_path("unshare"), "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        self.namespace = f"/proc/{self._holder.pid}/ns/net"
        self._await_namespace()
        port = f"port{number}"
        _run(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0"),
            *("address", _hardware(number), "netns", str(self._holder.pid)),
        )
        _run("ip", "link", "set", port, "master", "switch", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            self._ip(*words)

    @property
    def place(self) -> Place:
        """How a process is started here."""
        return Place(self.address, (_path("nsenter"), f"--net={self.namespace}"))

    @property
    def entering(self) -> Entering:
        """How a process that has begun comes here."""
        return Entering(self.namespace)

    def lose(self, number: int) -> None:
        """Have nothing that is sent from here arrive at another host."""
        self._neighbour(number, NOBODY)

    def find(self, number: int) -> None:
        """Have it arrive again."""
        self._neighbour(number, _hardware(number))

    def leave(self) -> None:
        """Let it go, once no process is left in it."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()

    def _neighbour(self, number: int, hardware: str) -> None:
        where = f"{SUBNET}.{number}"
        self._ip("neigh", "replace", where, "lladdr", hardware, "dev", "eth0", "nud", "permanent")

    def _ip(self, *words: str) -> None:
        _run(*self.place.before, "ip", *words)

    def _await_namespace(self) -> None:
        ours, until_s = Path("/proc/self/ns/net").readlink(), time.monotonic() + READY_S
        while Path(self.namespace).readlink() == ours:
            assert time.monotonic() < until_s, "unshare does not give a namespace"
            time.sleep(0.005)


class Network:
    """Hosts, and this process, the operator, beside them. ``enter_own`` comes first. Use it in a ``with``."""

    def __init__(self, hosts: int) -> None:
        """Make so many hosts, on which every one reaches every other."""
        _run("ip", "link", "set", "switch", "address", _hardware(OPERATOR))
        _run("ip", "addr", "add", f"{SUBNET}.{OPERATOR}/24", "dev", "switch")
        _run("ip", "link", "set", "switch", "up")
        self._cuts: Counter[tuple[int, int]] = Counter()
        self.hosts = [Host(number) for number in range(1, hosts + 1)]
        for host in self.hosts:
            for other in (*(each.number for each in self.hosts), OPERATOR):
                if other != host.number:
                    host.find(other)

    def cut(self, senders: Iterable[Host], receivers: Iterable[int]) -> list[tuple[Host, int]]:
        """Cut what goes from hosts to others; return it, for ``join``."""
        to = list(receivers)
        links = [(host, number) for host in senders for number in to if number != host.number]
        for host, number in links:
            self._cuts[host.number, number] += 1
            host.lose(number)
        return links

    def join(self, links: Iterable[tuple[Host, int]]) -> None:
        """Make links whole again, as far as nobody else has cut them."""
        for host, number in links:
            self._cuts[host.number, number] -= 1
            if not self._cuts[host.number, number]:
                host.find(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.leave()


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _path(program: str) -> str:
    found = shutil.which(program)
    assert found is not None, program
    return found


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
