"""Where agents listen unless told otherwise: the daemon of a host, and a fabric of ``ostraca up``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DAEMON_SOCKET = Path("/run/ostraca/agent.sock")
"""Where the agent of a pod's host listens for workers."""

TOKEN_FILE = "worker.token"  # noqa: S105 (its name)
"""In the directory of a fabric of ``ostraca up``: the token that workers of other hosts show."""

TLS_VARIABLES = ("OSTRACA_TLS_CA", "OSTRACA_TLS_CERT", "OSTRACA_TLS_KEY")
"""Of the environment: where the files of TLS lie, for who dials ``tls://``."""


def default_directory(environment: Mapping[str, str]) -> Path:
    """Return where ``up`` keeps a fabric unless told otherwise: the user's folder for state."""
    state = environment.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "ostraca"


def agent_socket(directory: Path, number: int) -> Path:
    """Return the socket of one of the agents of the fabric in *directory*."""
    return directory / f"agent-{number}.sock"


def directory_argument(text: str) -> Path:
    """Return an absolute path, for argparse: addresses of sockets are absolute."""
    return Path(text).expanduser().absolute()
