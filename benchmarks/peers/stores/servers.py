"""Servers of a peer, as children of its client process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

START_S = 30.0
_TRY_S = 0.05


@contextlib.contextmanager
def server(command: Sequence[str], *, port: int) -> Iterator[None]:
    """Run a server meanwhile, from the time when its loopback port is open.

    Raises ConnectionError if the server ends, or if the port is closed after ``START_S`` seconds.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            until_s = time.monotonic() + START_S
            while not _is_open(port):
                if process.poll() is not None or time.monotonic() > until_s:
                    raise ConnectionError(f"`{command[0]}` did not open its port")
                time.sleep(_TRY_S)
            yield
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _is_open(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0
