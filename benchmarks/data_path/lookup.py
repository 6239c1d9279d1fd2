"""D5: look-up of a chain of 512 blocks with a stored first half, beside an empty round trip.

The first measurement has two agents as processes, with a real
etcd; the second has two agents in one process. In both, about half of the blocks belong to an owner other
than the asked agent. In the third, all belong to the asked agent. A short run omits the first measurement.
The round trip is a Ping on a control connection of the same kind.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target
from benchmarks.support.operations import half_stored_chain, lookup_s
from benchmarks.support.pods import can_run, running_pod

from ostraca._connection.credentials import Credentials
from ostraca._connection.dial import ClientIdentity, dial
from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Comparison, measure, seconds_of
from ostraca_cli.tools.bench.workload import MeasureError, Workload
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.wire.address import parse_address
from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import Ping

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

MS = 1e3
BLOCK_BYTES = 64 << 10
_ANSWER_S = 5.0


class RoundTrips:
    """Connection for empty round trips; close after use."""

    def __init__(self, address: str) -> None:
        until_s = time.monotonic() + _ANSWER_S
        self._channel = dial(
            [parse_address(address)], ClientIdentity("default", Credentials(), {}), until_s=until_s
        )
        self._ping = encode(Ping(1))

    def turn_s(self) -> float:
        """Send a Ping; return the seconds until the Pong."""
        return seconds_of(self._ask)

    def close(self) -> None:
        """Disconnect."""
        self._channel.stream.close()

    def _ask(self) -> None:
        stream, reader = self._channel.stream, self._channel.reader
        stream.send(self._ping)
        while True:
            if not select.select([stream], [], [], _ANSWER_S)[0]:
                raise ConnectError("no answer to a Ping")
            count, _ = stream.receive(reader)
            if any(True for _ in reader.received(count)):
                return


def run(conditions: Conditions) -> list[Figure]:
    """Measure look-ups of a chain with a stored first half."""
    figures = []
    if not conditions.is_short and can_run(
        "the part of d5 with agents of their own"
    ):  # they take long to start
        with running_pod(conditions, agents=2) as pod:
            # Of shards that the second agent has taken over, the first one is asked, too, for a while.
            time.sleep(AgentSettings().drain_s)
            figures += _figures(conditions, pod.agents[0].address, "an owner elsewhere", round_trips=6)
            look = pod.agents[0].status()
            if look is None or not any(peer.asks.answered for peer in look.peers):
                raise MeasureError("the asked agent had nobody to ask")
    for agents, where, round_trips in ((2, "owners in one process", 6), (1, "a single owner", 4)):
        options = ("--agents", str(agents), "--capacity", str(suite.GIB // 2), "--dram", "0")
        with running_fabric(conditions.new_directory(), *options) as fabric:
            figures += _figures(conditions, fabric.address, where, round_trips=round_trips)
    return figures


def _figures(conditions: Conditions, address: str, where: str, *, round_trips: float) -> list[Figure]:
    """Measure look-ups at an address."""
    blocks = 32 if conditions.is_short else 512
    with (
        contextlib.closing(Workload(address, blocks=blocks // 2, block_bytes=BLOCK_BYTES)) as work,
        contextlib.closing(RoundTrips(address)) as trips,
    ):
        chain = half_stored_chain(work)
        found = measure(
            Comparison(
                "look-up", lambda: lookup_s(work, chain) * MS, "empty round trip", lambda: trips.turn_s() * MS
            ),
            conditions.pace,
        )
    what = f"look-up of {blocks} blocks, half there, {where}, p50"
    return [Figure("D5", what, "ms", found, Target(ratio_at_most=round_trips))]
