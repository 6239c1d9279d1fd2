"""Where a fabric of ``ostraca up`` lives, and where its agents listen."""

from __future__ import annotations

import os
from pathlib import Path


def default_directory() -> Path:
    """Return where ``up`` keeps a fabric unless told otherwise: the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "ostraca"


def directory_argument(text: str) -> Path:
    """Return an absolute path, for argparse: addresses of sockets are absolute."""
    return Path(text).expanduser().absolute()


def agent_socket(directory: Path, number: int) -> Path:
    """Return the socket of one of the agents of the fabric in *directory*."""
    return directory / f"agent-{number}.sock"
