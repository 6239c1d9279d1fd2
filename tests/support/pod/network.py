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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from tests.fabric.membership.nodes import Place

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

SUBNET = "192.0.2"
"""Set aside for documentation: nobody else has it."""

OPERATOR = 254
"""The last number of the address of this process itself."""

NOBODY = "02:00:00:00:ff:ff"
READY_S = 10.0
_NAMESPACE = Path("/proc/thread-self/ns/net")
"""Of the thread that looks."""


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


@contextmanager
def returning() -> Iterator[None]:
    """Take this thread back to its network at the end, if it has entered another one."""
    before = os.open(_NAMESPACE, os.O_RDONLY)
    try:
        yield
    finally:
        if not os.path.samestat(os.fstat(before), _NAMESPACE.stat()):
            _enter(before)
        os.close(before)


@dataclass(frozen=True)
class Entering:
    """Takes a process to a host. Call it before the process has another thread."""

    namespace: str

    def __call__(self) -> None:
        """Go there."""
        descriptor = os.open(self.namespace, os.O_RDONLY)
        try:
            _enter(descriptor)
        finally:
            os.close(descriptor)


class End:
    """One end of links: this process, or a host."""

    device = "switch"
    before: tuple[str, ...] = ()
    """What comes before a command that is to run there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"{SUBNET}.{number}"

    def lose(self, number: int) -> None:
        """Have nothing that is sent from here arrive at another end."""
        self._neighbour(number, NOBODY)

    def find(self, number: int) -> None:
        """Have it arrive again."""
        self._neighbour(number, _hardware(number))

    def _neighbour(self, number: int, hardware: str) -> None:
        where = f"{SUBNET}.{number}"
        self._ip("neigh", "replace", where, "lladdr", hardware, "dev", self.device, "nud", "permanent")

    def _ip(self, *words: str) -> None:
        _run(*self.before, "ip", *words)


class Host(End):
    """One host of a network."""

    device = "eth0"

    def __init__(self, number: int) -> None:
        """Have a namespace for it, and a link to the switch in this process's own."""
        super().__init__(number)
        self._holder = subprocess.Popen(
            [_path("unshare"), "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        self.namespace = f"/proc/{self._holder.pid}/ns/net"
        self.before = (_path("nsenter"), f"--net={self.namespace}")
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
        return Place(self.address, self.before)

    @property
    def entering(self) -> Entering:
        """How a process that has begun comes here."""
        return Entering(self.namespace)

    def leave(self) -> None:
        """Let it go, once no process is left in it."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()

    def _await_namespace(self) -> None:
        ours, until_s = _NAMESPACE.readlink(), time.monotonic() + READY_S
        while Path(self.namespace).readlink() == ours:
            assert time.monotonic() < until_s, "unshare does not give a namespace"
            time.sleep(0.005)


class Way(Enum):
    """What is lost between one end and others."""

    BOTH = "both ways"
    THERE = "there"
    """What it sends."""

    BACK = "back"
    """What they send."""


Links = list[tuple[End, int]]
"""Each from an end to the number of another."""


class Network:
    """Hosts, and this process, the operator, beside them. ``enter_own`` comes first. Use it in a ``with``."""

    def __init__(self, hosts: int) -> None:
        """Make so many hosts, on which every one reaches every other."""
        _run("ip", "link", "set", "switch", "address", _hardware(OPERATOR))
        _run("ip", "addr", "add", f"{SUBNET}.{OPERATOR}/24", "dev", "switch")
        _run("ip", "link", "set", "switch", "up")
        self._cuts: Counter[tuple[int, int]] = Counter()
        self.operator = End(OPERATOR)
        self.hosts = [Host(number) for number in range(1, hosts + 1)]
        ends = (*self.hosts, self.operator)
        for end in ends:
            for other in ends:
                if other is not end:
                    end.find(other.number)

    def cut(self, one: End, others: Sequence[End], way: Way = Way.BOTH) -> Links:
        """Cut an end from others; return what was cut, for ``join``."""
        others = [other for other in others if other is not one]
        links: Links = []
        if way is not Way.BACK:
            links += [(one, other.number) for other in others]
        if way is not Way.THERE:
            links += [(other, one.number) for other in others]
        for end, number in links:
            self._cuts[end.number, number] += 1
            end.lose(number)
        return links

    def join(self, links: Links) -> None:
        """Make links whole again, as far as nobody else has cut them."""
        for end, number in links:
            self._cuts[end.number, number] -= 1
            if not self._cuts[end.number, number]:
                end.find(number)

    @contextmanager
    def parted(self, one: End, others: Sequence[End], way: Way = Way.BOTH) -> Iterator[None]:
        """Have an end cut from others for as long as the block lasts."""
        links = self.cut(one, others, way)
        try:
            yield
        finally:
            self.join(links)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.leave()


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"


def _enter(namespace: int) -> None:
    assert _libc.setns(namespace, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def _path(program: str) -> str:
    found = shutil.which(program)
    assert found is not None, program
    return found


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
