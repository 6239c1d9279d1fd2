"""The pod of a soak.

Three members of etcd and agents as processes, each on a host of its own where the machine lets us.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.fabric.membership.nodes import HERE, Cluster
from tests.scenarios.soak.crew import Growth
from tests.scenarios.soak_pod.story import Story
from tests.support.pod.network import Host, Network
from tests.support.pod.processes import AgentProcess, Pod

MEMBERS = 3
TENANTS = ("tenant-0", "tenant-1", "stranger")
"""Of the workers that look whether bytes are right; the ledger's is the default one. The last never puts."""

READY_S = 60.0
END_S = 30.0
SETTLE_S = 90.0

TELLS_STACKS = {"PYTHONFAULTHANDLER": "1"}
"""With it an agent that hangs says at SIGABRT where each of its threads is."""

STOP_MAX_S = 30.0
"""An agent is stopped for so long at most."""

LATE_WRITE_S = 12.0
"""Shorter than an agent may be stopped: one that goes on must find out, and drop what it was to write."""

SETTINGS = (
    "etcd.lease_ttl_s=3",
    "etcd.operation_timeout_s=2",
    "owner.grant_s=3",
    "owner.hold_s=3",
    "owner.pin_max_s=1",
    "owner.pause_max_s=8",
    f"owner.late_write_s={LATE_WRITE_S}",
    "owner.adopt_every_s=1",
    "owner.scrub.pause_s=5",
    "turn_s=0.25",
    "drain_s=5",
    "memory.cache_bytes=0",
    "memory.staging_bytes=64MiB",
)


class PodError(Exception):
    """The pod does not do what it must when all is well; the message is the violation."""


class Guarded:
    """One agent, and what is known of its process."""

    def __init__(self, agent: AgentProcess, host: Host | None) -> None:
        self.name = agent.name
        self.agent = agent
        self.host = host
        self.growth = Growth()
        self._is_ready = False

    @property
    def pid(self) -> int:
        assert self.agent.process is not None
        return self.agent.process.pid

    def launch(self) -> None:
        self.agent.launch()
        self.growth, self._is_ready = Growth(), False

    def await_ready(self) -> None:
        """Wait for its ready line. Raises PodError when it does not come."""
        if not self.has_said_ready(within_s=READY_S):
            message = f"{self.name} is not ready after {READY_S:.0f} s:\n{self.last_words()}"
            raise PodError(message)

    def has_said_ready(self, *, within_s: float = 0.0) -> bool:
        """Say whether its ready line has come. Raises PodError when it ended instead."""
        assert self.agent.process is not None
        assert self.agent.process.stdout is not None
        if not self._is_ready and select.select([self.agent.process.stdout], [], [], within_s)[0]:
            try:
                self.agent.await_ready()
            except AssertionError:
                message = f"{self.name} does not start:\n{self.last_words()}"
                raise PodError(message) from None
            self._is_ready = True
        return self._is_ready

    def await_end(self) -> str | None:
        """Wait until it has ended in order, as it was told to; return what is wrong with how it did."""
        assert self.agent.process is not None
        try:
            self.agent.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.agent.signal(signal.SIGABRT)
            self.agent.signal(signal.SIGCONT)  # it may stand still
            self.agent.ended()
            return f"{self.name} has not ended {END_S:.0f} s after SIGTERM:\n{self.last_words()}"
        code = self.agent.ended()
        return f"{self.name} ended with {code} after SIGTERM:\n{self.last_words()}" if code else None

    def died_of(self) -> str | None:
        """Return how it ended, when nobody ended it."""
        code = None if self.agent.process is None else self.agent.process.poll()
        return None if code is None else f"{self.name} ended by itself, with {code}:\n{self.last_words()}"

    def last_words(self) -> str:
        return self.agent.log.read_text()[-6000:] if self.agent.log.exists() else ""


class SoakPod:
    """Use it in a ``with`` block; ``begin`` comes first."""

    def __init__(
        self,
        folder: Path,
        story: Story,
        *,
        agents: int,
        transport: str,
        has_hosts: bool,
        capacity: str,
    ) -> None:
        """Plan it. Where it *has_hosts*, this process has entered a network of its own."""
        self.story = story
        self._folder = folder
        self._count = agents
        self._transport = transport
        self._has_hosts = has_hosts
        self._capacity = capacity
        self._stack = ExitStack()
        self.network: Network | None = None
        self.agents: list[Guarded] = []

    def begin(self) -> None:
        """Make hosts, etcd and the fabric, and start all agents."""
        if self._has_hosts:
            self.network = self._stack.enter_context(Network(MEMBERS + self._count))
        self.etcd_hosts = [] if self.network is None else self.network.hosts[:MEMBERS]
        self.etcd = Cluster(self._folder, MEMBERS, places=[host.place for host in self.etcd_hosts])
        self._stack.callback(self.etcd.close)
        others = tuple(word for endpoint in self.etcd.endpoints[1:] for word in ("--etcd", endpoint))
        self.pod = self._stack.enter_context(Pod(self._folder, self.etcd, also=others, settings=SETTINGS))
        self.pod.create(enclosures=3, drives=2, capacity=self._capacity, segment="4MiB")
        self.files = self.pod.files
        self._add_tenants()
        more = ("--transport", "inline") if self._transport != "inline" else ()
        for number in range(self._count):
            host = None if self.network is None else self.network.hosts[MEMBERS + number]
            place = HERE if host is None else host.place
            agent = self.pod.agent(
                f"agent-{number}",
                *more,
                transport=self._transport,
                place=place,
                environment=os.environ | TELLS_STACKS,
            )
            self.agents.append(Guarded(agent, host))
        self.start()

    def start(self) -> None:
        """Start what does not run, and wait until each shard is served. Raises PodError."""
        self.etcd.start()
        for each in self.agents:
            if not each.agent.runs:
                each.launch()
        for each in self.agents:
            each.await_ready()
        try:
            self.pod.await_settled(within_s=SETTLE_S)
        except AssertionError:
            message = (
                f"shards are not served by all agents {SETTLE_S:.0f} s after all was well: {self.shares()}"
            )
            raise PodError(message) from None

    def shares(self) -> str:
        """Say which agent serves how many shards, and how far it has read them."""
        told = []
        for each in self.agents:
            look = each.agent.status()
            shards = (
                "no answer"
                if look is None
                else [f"{shard.shard} {shard.recovered:.2f}" for shard in look.shards]
            )
            told.append(f"{each.name}: {shards}")
        return "; ".join(told)

    def kill(self) -> None:
        """Kill all agents at once."""
        for each in self.agents:
            each.agent.signal(signal.SIGKILL)
        for each in self.agents:
            each.agent.ended()

    def stop(self) -> list[str]:
        """End all agents in order; return what is wrong with how they did."""
        for each in self.agents:
            each.agent.signal(signal.SIGTERM)
        return [wrong for each in self.agents if (wrong := each.await_end()) is not None]

    def crashes(self) -> list[str]:
        """Return the lines of logs that tell of a bug."""
        return [
            f"{each.name}'s log: {line}"
            for each in self.agents
            for line in each.agent.log.read_text().splitlines()
            if "Traceback" in line or " bug" in line
        ]

    def token(self) -> str:
        """Return what the ledger's worker shows over TCP."""
        tokens: dict[str, list[str]] = tomllib.loads((self.files / "tokens.toml").read_text())["tokens"]
        return tokens["default"][0]

    def _add_tenants(self) -> None:
        users = "".join(f"{tenant} = [{os.getuid()}]\n" for tenant in ("default", *TENANTS))
        with (self.files / "tokens.toml").open("a") as file:
            file.write(f"\n[users]\n{users}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
