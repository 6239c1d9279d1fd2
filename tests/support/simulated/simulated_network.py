"""A network of named hosts, in one event loop: it delays, cuts bytes into pieces, refuses, crashes and parts.

``host(name)`` is a ``Network`` for what runs on that host. What happens follows from the seed and from the
order of calls alone, so on a ``VirtualLoop`` a run can be repeated. Faults are methods: links are *cut* in
one direction or both and *healed*, hosts *crash* and are *restarted*. Connections over what stays cut, or to
a host that fell silent, are lost at both ends after ``give_up_s``, as TCP's keepalive does it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.support.simulated.simulated_stream import Link, LinkSettings, SimulatedTransport, joined

from ostraca_fabric.connection.network import Accept, Listening
from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.wire.address import Address, TcpAddress, TlsAddress, UnixAddress

_FIRST_PORT = 40_000
_HERE = ("localhost", "127.0.0.1", "0.0.0.0", "::", "::1")


@dataclass(slots=True)
class _Place:
    """Where a host listens."""

    address: Address
    accept: Accept
    network: HostNetwork

    def close(self) -> None:
        self.network.forget(self)


class HostNetwork:
    """One host's part of the network: a ``Network`` for who runs there."""

    def __init__(self, name: str, network: SimulatedNetwork) -> None:
        """Be made by ``SimulatedNetwork.host``."""
        self.name = name
        self.is_up = True
        self.answers = asyncio.Event()
        """Set unless it crashed silently: then it does not even refuse."""

        self.answers.set()
        self._network = network
        self._ports = itertools.count(_FIRST_PORT)
        self._places: dict[int | str, _Place] = {}

    async def listen(self, address: Address, accept: Accept) -> Listening:
        """Accept connections; TCP ports of one host are one range, whatever names it gives itself."""
        real = address
        if isinstance(address, TlsAddress):
            raise UsageError(f"{address}: nothing is encrypted in a simulation")
        if isinstance(address, TcpAddress):
            real = TcpAddress(self.name, address.port or next(self._ports))
        place = _Place(real, accept, self)
        if not self.is_up or self._places.setdefault(_key(real), place) is not place:
            raise ConnectError(f"can't listen at {address} of {self.name}: it is taken, or the host is down")
        return place

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol) -> None:
        """Connect, over the links there and back."""
        await self._network.connect(self, address, protocol)

    def place(self, address: Address) -> _Place | None:
        """Return who listens there."""
        return self._places.get(_key(address)) if self.is_up else None

    def forget(self, place: _Place) -> None:
        """Listen there no more."""
        if self._places.get(_key(place.address)) is place:
            del self._places[_key(place.address)]

    def go_down(self, *, silently: bool) -> None:
        """Crash: everything that listened is gone."""
        self.is_up = False
        if silently:
            self.answers.clear()
        self._places.clear()


class SimulatedNetwork:
    """All hosts and the links between them."""

    def __init__(
        self,
        seed: int,
        *,
        links: LinkSettings | None = None,
        give_up_s: float = 30.0,
        uid: int = 0,
    ) -> None:
        """Begin with no host; *links* is how all links begin, *uid* who everyone on one machine is."""
        self._dice = random.Random(seed)
        self._settings = links or LinkSettings()
        self._give_up_s = give_up_s
        self._uid = uid
        self._hosts: dict[str, HostNetwork] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._healed: dict[tuple[str, str], asyncio.Event] = {}
        self._ends: dict[SimulatedTransport, None] = {}
        self._beside: set[tuple[str, str]] = set()

    def host(self, name: str) -> HostNetwork:
        """Return a host, made when it is first named."""
        return self._hosts.setdefault(name, HostNetwork(name, self))

    @property
    def connections(self) -> int:
        """How many ends of connections are open."""
        return sum(not end.is_gone for end in self._ends)

    def put_beside(self, caller: str, called: str) -> None:
        """Let a host see whose another one's connections are, as on a unix socket of one machine."""
        self._beside.add((caller, called))

    def set_link(self, source: str, target: str, settings: LinkSettings) -> None:
        """Say how bytes travel from *source* to *target* from now on: a slow link, for one."""
        self._link(source, target).settings = settings

    def slow_down(self, source: str, target: str, *, delay_s: float) -> None:
        """Let everything take *delay_s* longer than it would by default, both ways."""
        least, most = self._settings.delay_s
        slow = replace(self._settings, delay_s=(least + delay_s, most + delay_s))
        self.set_link(source, target, slow)
        self.set_link(target, source, slow)

    def narrow(self, source: str, target: str, *, bytes_per_s: float) -> None:
        """Let so few bytes pass in a second, both ways."""
        narrow = replace(self._settings, bytes_per_s=bytes_per_s)
        self.set_link(source, target, narrow)
        self.set_link(target, source, narrow)

    # Faults.

    def cut(self, source: str, target: str) -> None:
        """Hold back what goes from *source* to *target*, this way only."""
        link = self._link(source, target)
        if not link.is_cut:
            link.is_cut = True
            healed = self._healed[source, target] = asyncio.Event()
            asyncio.get_running_loop().call_later(self._give_up_s, self._give_up, source, target, healed)

    def heal(self, source: str, target: str, *, is_lost: bool = False) -> None:
        """Let what was held back go on, or lose it: connections between the two are then reset."""
        link = self._link(source, target)
        if not link.is_cut:
            return
        link.is_cut = False
        self._healed.pop((source, target)).set()
        for end in self._between(source, target):
            if is_lost:
                end.lose(ConnectionResetError("what was sent is lost"))
            else:
                end.go_on()

    def part(self, one: str, *others: str) -> None:
        """Cut one host off from others, both ways."""
        for other in others:
            self.cut(one, other)
            self.cut(other, one)

    def join(self, one: str, *others: str, is_lost: bool = False) -> None:
        """Heal what ``part`` cut."""
        for other in others:
            self.heal(one, other, is_lost=is_lost)
            self.heal(other, one, is_lost=is_lost)

    def crash(self, name: str, *, silently: bool = False) -> None:
        """Stop a host. Its connections are reset, and new ones refused; or it falls *silently*.

        What runs there hears nothing any more from the network, not even that its connections are gone:
        whoever simulates a crash stops it.
        """
        host = self.host(name)
        host.go_down(silently=silently)
        others = [end for end in self._ends if end.to_host == name and end.host != name]
        for end in [end for end in self._ends if end.host == name]:
            end.die(silently=silently)
        if silently:
            loop = asyncio.get_running_loop()
            loop.call_later(self._give_up_s, _lose_all, others, f"nothing heard from {name}")

    def restart(self, name: str) -> None:
        """Let a host take connections again; those of before are unknown to it, and reset when used."""
        host = self.host(name)
        host.is_up = True
        host.answers.set()

    # For hosts.

    async def connect(
        self, caller: HostNetwork, address: Address, protocol: asyncio.BufferedProtocol
    ) -> None:
        """Connect *protocol* to who listens there, over the links there and back. Raises OSError."""
        if not caller.is_up:
            raise OSError(f"host {caller.name} is down")
        name = caller.name
        if isinstance(address, TlsAddress):
            raise OSError(f"{address}: nothing is encrypted in a simulation")
        if isinstance(address, TcpAddress) and address.host not in _HERE:
            name = address.host
        called = self._hosts.get(name)
        if called is None:
            raise OSError(f"no host is called {name}")
        await self._cross(caller, called)
        if not caller.is_up:
            raise OSError(f"host {caller.name} went down")
        place = called.place(address)
        if place is None:
            await self._cross(called, caller)
            raise ConnectionRefusedError(f"nobody listens at {address}")
        is_here = isinstance(address, UnixAddress) or (caller.name, name) in self._beside
        extra = {"peer_uid": self._uid if is_here else None}
        ours, theirs = joined(self._end(caller, called, extra), self._end(called, caller, extra))
        theirs.begin(place.accept())
        try:
            await self._cross(called, caller)
        except BaseException:
            ours.abort()
            raise
        if ours.is_closing():
            raise ConnectionResetError(f"{address} reset the connection at once")
        ours.begin(protocol)

    async def _cross(self, source: HostNetwork, target: HostNetwork) -> None:
        """Take something short from host to host; a cut link or a silent host takes as long as it is so."""
        link = self._link(source.name, target.name)
        await asyncio.sleep(link.delay_s())
        while link.is_cut or not target.answers.is_set():
            if link.is_cut:
                await self._healed[source.name, target.name].wait()
            else:
                await target.answers.wait()
            await asyncio.sleep(link.delay_s())

    def _link(self, source: str, target: str) -> Link:
        found = self._links.get((source, target))
        if found is None:
            own_dice = random.Random(self._dice.random())
            found = self._links[source, target] = Link(self._settings, own_dice)
        return found

    def _end(self, at: HostNetwork, to: HostNetwork, extra: dict[str, int | None]) -> SimulatedTransport:
        end = SimulatedTransport(at.name, to.name, self._link(at.name, to.name), extra)
        end.may_answer = at.answers.is_set
        end.when_gone = self._forget
        self._ends[end] = None
        return end

    def _forget(self, gone: SimulatedTransport) -> None:
        """Forget a connection when both ends are gone."""
        if gone.other.is_gone:
            del self._ends[gone]
            del self._ends[gone.other]

    def _between(self, one: str, other: str) -> Iterator[SimulatedTransport]:
        return iter([end for end in self._ends if {end.host, end.to_host} == {one, other}])

    def _give_up(self, source: str, target: str, healed: asyncio.Event) -> None:
        if not healed.is_set():
            _lose_all(list(self._between(source, target)), f"nothing passes from {source} to {target}")


def _lose_all(ends: list[SimulatedTransport], why: str) -> None:
    for end in ends:
        end.lose(TimeoutError(why))


def _key(address: Address) -> int | str:
    return address.path if isinstance(address, UnixAddress) else address.port
