"""Node with memory of a Mooncake store, started with the address of the master, bytes and a port.

The node opens the port when ready, and closes connections there at once.
"""

from __future__ import annotations

import socket
import sys

from mooncake.store import MooncakeDistributedStore

HOST = "127.0.0.1"
_BUFFER_BYTES = 64 << 20


def connected(master: str, memory_bytes: int = 0) -> MooncakeDistributedStore:
    """Connect to a master over the loopback interface. Raises ConnectionError."""
    client = MooncakeDistributedStore()
    code = client.setup(HOST, "P2PHANDSHAKE", memory_bytes, _BUFFER_BYTES, "tcp", "", master)
    if code:
        raise ConnectionError(f"Mooncake's set-up failed with {code}")
    return client


def main(master: str, memory_bytes: int, port: int) -> None:
    """Lend memory until a signal."""
    node = connected(master, memory_bytes)
    with socket.create_server((HOST, port)) as ready:
        while node:
            ready.accept()[0].close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
