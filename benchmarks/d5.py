"""D5: how long a look-up of a chain of 512 blocks takes, half of it there, beside an empty round trip.

ADR 0026 says why it is asked to take a millisecond at most. Once the owners are two agents that are processes
of their own, with a real etcd, and once two agents of one process: about half of the blocks are with an owner
that is not the asked agent. A short run leaves the former out. The round trip is a Ping on a control
connection like the look-up's.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING

from benchmarks.figure import Figure, Target
from benchmarks.pods import can_run, running_pod
from ostraca.cli.bench import suite
from ostraca.cli.bench.fabric import running_fabric
from ostraca.cli.bench.series import Case, measure, seconds_of
from ostraca.cli.bench.workload import MeasureError, Workload
from ostraca.dial import Caller, dial
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.address import parse_address
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import Ping

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions

MS = 1e3
BLOCK_BYTES = 64 << 10
_ANSWER_S = 5.0


class RoundTrips:
    """A connection that asks for nothing but an answer. Close it."""

    def __init__(self, address: str) -> None:
        until_s = time.monotonic() + _ANSWER_S
        self._dialled = dial([parse_address(address)], Caller("default", "", {}), until_s=until_s)
        self._ping = encode(Ping(1))

    def turn_s(self) -> float:
        """Ping; return seconds until the Pong."""
        return seconds_of(self._ask)

    def close(self) -> None:
        """Disconnect."""
        self._dialled.line.close()

    def _ask(self) -> None:
        line, reader = self._dialled.line, self._dialled.reader
        line.send(self._ping)
        while True:
            if not select.select([line], [], [], _ANSWER_S)[0]:
                raise ConnectError("no answer to a Ping")
            count, _ = line.receive(reader)
            if any(True for _ in reader.received(count)):
                return


def run(conditions: Conditions) -> list[Figure]:
    """Measure look-ups of a chain whose first half is stored."""
    figures = []
    if not conditions.is_short and can_run(
        "the part of d5 with agents of their own"
    ):  # they take long to start
        with running_pod(conditions, agents=2) as pod:
            # Of shards that the second agent has taken over, the first one is asked, too, for a while.
            time.sleep(AgentSettings().drain_s)
            figures += _figures(conditions, pod.agents[0].address, "an owner elsewhere")
            look = pod.agents[0].status()
            if look is None or not any(peer.asks.answered for peer in look.peers):
                raise MeasureError("the asked agent had nobody to ask")
    options = ("--agents", "2", "--capacity", str(suite.GIB // 2), "--dram", "0")
    with running_fabric(conditions.new_directory(), *options) as fabric:
        figures += _figures(conditions, fabric.address, "owners in one process")
    return figures


def _figures(conditions: Conditions, address: str, where: str) -> list[Figure]:
    """Look up what the agent at an address and another one own."""
    blocks = 32 if conditions.is_short else 512
    with (
        contextlib.closing(Workload(address, blocks=blocks // 2, block_bytes=BLOCK_BYTES)) as work,
        contextlib.closing(RoundTrips(address)) as trips,
    ):
        chain = work.half_stored_chain()
        found = measure(
            Case(
                "look-up", lambda: work.lookup_s(chain) * MS, "empty round trip", lambda: trips.turn_s() * MS
            ),
            conditions.pace,
        )
    what = f"look-up of {blocks} blocks, half there, {where}, p50"
    return [Figure("D5", what, "ms", found, Target(value_at_most=1.0))]
