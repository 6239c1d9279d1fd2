"""Worker host of D9: ``python -m benchmarks.data_path.get_over_tcp_worker``, with an order as JSON on stdin.

The program gets a batch as views over the network, in turns with a plain TCP socket of the same two hosts,
and prints both series as JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys

import msgspec

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.series import Comparison, Pacing, gb_per_s, measure
from ostraca_cli.tools.bench.workload import Workload
from ostraca_fabric.runtime.memory import HugeMemory


class Order(msgspec.Struct, frozen=True):
    """Parameters of the measurement."""

    address: str
    token: str
    blocks: int
    block_bytes: int
    source: tuple[str, int]
    """Address of ``tcp_source``."""

    seconds: float
    rounds_min: int
    warm_ups: int


class PlainSocket:
    """Receiver of a batch from ``tcp_source`` into huge-page memory; close after use."""

    def __init__(self, source: tuple[str, int], batch_bytes: int) -> None:
        self._socket = socket.create_connection(source)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = HugeMemory(batch_bytes, prefault=True)
        self._bytes = batch_bytes

    def turn(self) -> float:
        """Receive one batch; return GB/s."""
        return gb_per_s(self._bytes, self._receive)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._memory.close()

    def _receive(self) -> None:
        self._socket.sendall(b"!")
        left = self._memory.view[: self._bytes]
        while left:
            left = left[self._socket.recv_into(left) :]


def main() -> None:
    """Measure, and print both series."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    batch_bytes = order.blocks * order.block_bytes
    with (
        contextlib.closing(
            Workload(
                order.address, blocks=order.blocks, block_bytes=order.block_bytes, credentials=order.token
            )
        ) as work,
        contextlib.closing(PlainSocket(order.source, batch_bytes)) as plain,
    ):
        chain = suite.resident_chain(work)
        pace = Pacing(order.seconds, order.rounds_min, order.warm_ups)
        found = measure(Comparison("views", lambda: work.get_views(chain), "TCP socket", plain.turn), pace)
        said = {
            "transport": work.client.transport,
            "measured": found.measured.values,
            "limit": found.limit.values,
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
