"""``python -m benchmarks.support.tcp_source HOST BYTES``: send BYTES at full speed for each received byte.

The program prints its port, serves a single connection, and ends with the connection.
"""

from __future__ import annotations

import socket
import sys


def main(host: str, size_bytes: int) -> None:
    """Serve a connection."""
    batch = memoryview(bytearray(size_bytes))
    with socket.create_server((host, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            connection.sendall(batch)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
