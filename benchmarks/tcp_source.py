"""``python -m benchmarks.tcp_source HOST BYTES``: for each byte it gets it sends BYTES, as fast as it can.

Prints its port, serves one connection, and ends with it.
"""

from __future__ import annotations

import socket
import sys


def main(host: str, size_bytes: int) -> None:
    """Serve one connection."""
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
