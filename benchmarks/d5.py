"""D5: how long a look-up of a chain of 512 blocks takes, half of it there, beside an empty round trip.

Two agents own the shards, so that about half of the blocks are with an owner that is not the asked agent. The
round trip is a Ping on a control connection like the look-up's.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING

from benchmarks.figure import Figure, Target
from ostraca.cli.bench import suite
from ostraca.cli.bench.fabric import running_fabric
from ostraca.cli.bench.series import Case, measure, seconds_of
from ostraca.cli.bench.workload import Workload
from ostraca.dial import Caller, dial
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
    blocks = 32 if conditions.is_short else 512
    options = ("--agents", "2", "--capacity", str(suite.GIB // 2), "--dram", "0")
    with (
        running_fabric(conditions.new_directory(), *options) as fabric,
        contextlib.closing(Workload(fabric.address, blocks=blocks // 2, block_bytes=BLOCK_BYTES)) as work,
        contextlib.closing(RoundTrips(fabric.address)) as trips,
    ):
        chain = work.half_stored_chain()
        found = measure(
            Case(
                "look-up", lambda: work.lookup_s(chain) * MS, "empty round trip", lambda: trips.turn_s() * MS
            ),
            conditions.pace,
        )
    what = f"look-up of {blocks} blocks, half there, p50"
    return [
        Figure("D5", what, "ms", found, Target(value_at_most=0.25)),
        Figure("D5", f"{what}, beside", "ms", found, Target(ratio_at_most=4.0)),
    ]
