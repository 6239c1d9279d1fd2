"""Mooncake's store over TCP: a master, a node with memory, and a client without memory of its own.

The client uses Mooncake's zero-copy calls on registered memory. The environment variable
``MOONCAKE_STORE_CHECKSUM`` turns the client's checksums on.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import mooncake
from mooncake.store import MooncakeDistributedStore

from benchmarks.peers.stores.mooncake_node import HOST, connected
from benchmarks.peers.stores.servers import free_port, server
from benchmarks.peers.stores.turns import Order, Rows, Store, serve

_MEMORY_BYTES_MIN = 64 << 20


class MooncakeStore(Store[list[str]]):
    """Client of a Mooncake store; all rows are in registered memory."""

    version = metadata.version("mooncake-transfer-engine-non-cuda")

    def __init__(self, client: MooncakeDistributedStore) -> None:
        self._client = client

    def names(self, labels: Sequence[str]) -> list[str]:
        """Return the labels."""
        return list(labels)

    def put(self, names: list[str], rows: Rows) -> None:
        """Put from registered memory."""
        if len(names) == 1:
            codes = [self._client.put_from(names[0], rows.ctypes.data, rows.nbytes)]
        else:
            codes = self._client.batch_put_from(names, *_places(rows))
        if any(codes):
            raise OSError(f"puts failed with {codes}")

    def get(self, names: list[str], rows: Rows) -> None:
        """Get into registered memory."""
        if len(names) == 1:
            codes = [self._client.get_into(names[0], rows.ctypes.data, rows.nbytes)]
        else:
            codes = self._client.batch_get_into(names, *_places(rows))
        if set(codes) != {rows.shape[1]}:
            raise OSError(f"gets failed with {codes}")

    def count(self, names: list[str]) -> int:
        """Ask the master."""
        found: list[int] = self._client.batch_is_exist(names)
        return found.count(1)

    def forget(self, names: list[str]) -> None:
        """Remove blocks before the end of their leases."""
        codes = self._client.batch_remove(names, force=True)
        if any(codes):
            raise OSError(f"removals failed with {codes}")


def _places(rows: Rows) -> tuple[list[int], list[int]]:
    """Return addresses and lengths."""
    count, block_bytes = rows.shape
    start = rows.ctypes.data
    return list(range(start, start + rows.nbytes, block_bytes)), [block_bytes] * count


@contextlib.contextmanager
def _open_store(order: Order, memory: Rows) -> Iterator[MooncakeStore]:
    port, metrics_port, node_port = free_port(), free_port(), free_port()
    program = Path(mooncake.__file__).parent / "mooncake_master"
    master = [
        *(str(program), f"-rpc_address={HOST}", f"-rpc_port={port}"),
        *(f"-metrics_host={HOST}", f"-metrics_port={metrics_port}"),
    ]
    memory_bytes = max(_MEMORY_BYTES_MIN, order.held_bytes)
    node = [sys.executable, "-m", "benchmarks.peers.stores.mooncake_node", f"{HOST}:{port}"]
    with server(master, port=port), server([*node, str(memory_bytes), str(node_port)], port=node_port):
        client = connected(f"{HOST}:{port}")
        client.register_buffer(memory.ctypes.data, memory.nbytes)
        try:
            yield MooncakeStore(client)
        finally:
            client.close()


if __name__ == "__main__":
    serve(_open_store)
