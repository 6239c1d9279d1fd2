"""Default addresses of agents: the daemon of a host, and a fabric of ``ostraca up``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ostraca_fabric.errors import UsageError

DAEMON_SOCKET = Path("/run/ostraca/agent.sock")
"""Socket for workers on the agent of a pod's host."""

TOKEN_FILE = "worker.token"  # noqa: S105 (its name)
"""Token for workers of other hosts, in the directory of a fabric of ``ostraca up``."""

ADMIN_URL = "http://127.0.0.1:7480"
"""Default URL of the admin service."""

ADMIN_URL_VARIABLE = "OSTRACA_ADMIN_URL"
ADMIN_TOKEN_VARIABLE = "OSTRACA_ADMIN_TOKEN"  # noqa: S105 (the variable's name, not a token)
"""Environment variables of the admin service's clients."""

TLS_VARIABLES = ("OSTRACA_TLS_CA", "OSTRACA_TLS_CERT", "OSTRACA_TLS_KEY")
"""Environment variables with the TLS files of a client of ``tls://``."""

TOKEN_FILE_VARIABLE = "OSTRACA_TOKEN_FILE"  # noqa: S105 (its name)
"""Environment variable with the token file of a worker."""


def default_directory(environment: Mapping[str, str]) -> Path:
    """Return the default directory of ``up``: the user's folder for state.

    An empty or relative XDG_STATE_HOME or HOME counts as not set, since state would depend on the working
    directory. Raises UsageError if the passwd file names no home either.
    """
    state = environment.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state) / "ostraca"
    return _own_home(environment) / ".local" / "state" / "ostraca"


def default_directory_words(environment: Mapping[str, str]) -> str:
    """Return the default directory for ``--help``; never raises."""
    try:
        return str(default_directory(environment))
    except UsageError:
        return "none, as HOME is not set"


def agent_socket(directory: Path, number: int) -> Path:
    """Return the socket of an agent of the fabric in *directory*."""
    return directory / f"agent-{number}.sock"


def directory_argument(text: str) -> Path:
    """Return an absolute path, for argparse: addresses of sockets are absolute."""
    from argparse import ArgumentTypeError  # noqa: PLC0415 (the SDK does without)

    if not text:
        raise ArgumentTypeError("an empty text names no directory: write its path")
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python's replacement for undecodable bytes
        raise ArgumentTypeError(
            f"{text!a} is no text here, and addresses of agents are: take another name, or set LC_ALL=C.UTF-8"
        )
    try:
        if text == "~" or text.startswith("~/"):
            return _own_home(os.environ) / text[2:].lstrip("/")
        return Path(text).expanduser().absolute()
    except (RuntimeError, UsageError) as error:  # RuntimeError is pathlib's, for ~ of an unknown user
        raise ArgumentTypeError(
            f"{text!r} begins with a home that is not known here: write the path from / on"
        ) from error
    except OSError as error:
        raise ArgumentTypeError(
            f"{text!r} is relative, and the working directory can't be told ({error.strerror}): write "
            "the path from / on"
        ) from error


def _own_home(environment: Mapping[str, str]) -> Path:
    """Return the home of this process's user.

    Raises UsageError if HOME and the passwd file name none.
    """
    import pwd  # noqa: PLC0415 (few processes ask for it)

    home = environment.get("HOME", "")
    with suppress(KeyError, OSError):
        home = home if home.startswith("/") else pwd.getpwuid(os.getuid()).pw_dir
    if not home.startswith("/"):
        raise UsageError(
            f"no default directory is known: HOME is not set, and user {os.getuid()} has no home in the "
            "passwd file; pass --dir DIR, or set HOME"
        )
    return Path(home)
