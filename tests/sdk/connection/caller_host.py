"""A client with connections of callers, and an agent by script at their other end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, hashes
from tests.sdk.operations.test_faults import FAR_S
from tests.sdk.scripted_agent import AgentConnection, ScriptedAgent
from tests.support.stalls import Stopwatch

import ostraca
from ostraca._connection.caller_connections import CallerConnection, CallerConnections
from ostraca_fabric.wire.messages import Failure, Message

Answer = Callable[[AgentConnection, Any], None]


def wait_for(is_so: Callable[[], object]) -> None:
    watch = Stopwatch()
    while not is_so():
        assert watch.passed_s < FAR_S
        time.sleep(0.001)  # nothing tells


class CallerHost:
    """A client with connections of callers, and the agent's ends of all."""

    def __init__(self, agent: ScriptedAgent, client: ostraca.Client) -> None:
        self.agent, self.client = agent, client
        self.session: AgentConnection = agent.connections.get(timeout=FAR_S)
        self.of_callers: list[AgentConnection] = []
        self.volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self.chain = self.volume.chain(hashes(4))

    @property
    def callers(self) -> CallerConnections:
        return self.client._runtime.connections.callers

    @property
    def idle(self) -> list[CallerConnection]:
        return list(self.callers._idle)

    def open(self, count: int = 1) -> None:
        """Have connections opened, as after many operations that lacked one."""
        self.callers._wanted = 0
        for _ in range(4 * count):
            self.client._runner.do(self.callers.want_another)
        wait_for(lambda: len(self.callers._idle) == count)
        self.of_callers += [self.agent.connections.get(timeout=FAR_S) for _ in range(count)]

    def lookup(self, deadline_s: float = FAR_S) -> ostraca.LookupResult:
        return self.volume.lookup(self.chain, deadline_s=deadline_s)

    def answer(self, kind: type[Message], answer: Answer) -> list[AgentConnection]:
        """Have the agent answer callers so, and the driver as usual; return what connections are asked on."""
        asked: list[AgentConnection] = []

        def decide(connection: AgentConnection, message: Any) -> None:
            asked.append(connection)
            (ScriptedAgent.usual if connection is self.session else answer)(connection, message)

        self.agent.script[kind] = decide
        return asked


@contextmanager
def host_of(agent: ScriptedAgent, **changed: Any) -> Iterator[CallerHost]:
    with ostraca.connect(agent.address, settings=replace(SETTINGS, **changed)) as client:
        yield CallerHost(agent, client)


def failing(code: str) -> Answer:
    return lambda connection, message: connection.send(Failure(message.request, code, "because"))
