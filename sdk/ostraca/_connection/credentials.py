"""Credentials: source and format of a client's token.

A token may be replaced during the life of its client. Each dial therefore reads the token again, from a
callable, from a file, or from the last ``set``. An unreadable token fails the dial with ConnectError, and the
next dial reads again. Reading runs in a thread, because a callable or a file system may take longer than the
dial's deadline. No message repeats a token.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from ostraca.settings import ClientSettings
from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.runtime.threads import run_in_background
from ostraca_fabric.sockets.default_paths import TOKEN_FILE_VARIABLE

TOKEN_BYTES_MAX = 16 << 10
"""Longest token: anything longer is not a token file."""

TokenSource = str | Callable[[], str] | None
"""A token, a callable that returns one, or None."""


class TokenError(ConnectError):
    """Failure to read the client's own token; no agent was asked."""


class Credentials:
    """Current token of one client. Thread-safe."""

    def __init__(self, given: TokenSource = None, *, file: str = "") -> None:
        """Use the *given* token, else the content of *file*, else no token.

        Raises UsageError.
        """
        self._file = file
        self._lock = threading.Lock()  # guards the next fields
        self._given = _check_source(given)
        self._reading: Future[str] | None = None

    def set(self, given: TokenSource) -> None:
        """Use this token from the next dial on; None: the file again, if configured.

        Raises UsageError.
        """
        checked = _check_source(given)
        with self._lock:
            self._given, self._reading = checked, None

    def token(self, until_s: float) -> str:
        """Return the token to show now; empty for none.

        Raises TokenError, by *until_s* at the latest.
        """
        with self._lock:
            given = self._given
            if given is None and not self._file:
                return ""
            if isinstance(given, str):
                return given
            if self._reading is None:
                self._reading = run_in_background(
                    "token", lambda: _read_file(self._file) if given is None else _call_source(given)
                )
            reading = self._reading
        try:
            token = reading.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError as error:
            source = "the credentials' callable" if given is not None else self._file
            raise TokenError(
                f"{source} gave no token in time: the next dial uses a token that arrives later"
            ) from error
        finally:
            with self._lock:
                if reading.done() and self._reading is reading:
                    self._reading = None
        return token


def choose_credentials(
    given: TokenSource, settings: ClientSettings, environment: Mapping[str, str]
) -> Credentials:
    """Choose the passed credentials, else the settings' file, else the variable's.

    The variable is OSTRACA_TOKEN_FILE. Raises UsageError.
    """
    return Credentials(given, file=settings.token_file or environment.get(TOKEN_FILE_VARIABLE, ""))


def _check_source(given: object) -> TokenSource:
    if given is None or callable(given):
        return given
    if not isinstance(given, str) or not given.strip():
        found = "an empty text" if isinstance(given, str) else f"a {type(given).__name__}"
        raise UsageError(
            f"credentials is {found}: pass a token as a string, a callable that returns a token, or None if "
            "a unix socket's peer credentials suffice"
        )
    token = given.strip()
    wrong = _find_flaw(token)
    if wrong:
        raise UsageError(
            f"credentials {wrong}: pass the token alone, or name the file as token_file in the settings"
        )
    return token


def _find_flaw(token: str) -> str:
    """Return the flaw of a token, as words for a message; empty for a valid token."""
    if not token.isascii() or not token.isprintable() or " " in token:
        return "holds a space, a line break or another character that no token has"
    if len(token) > TOKEN_BYTES_MAX:
        return f"has {len(token)} characters and a token at most {TOKEN_BYTES_MAX}"
    return ""


def _call_source(source: Callable[[], object]) -> str:
    """Ask a callable for the token. Raises TokenError."""
    try:
        found = source()
    except (Exception, SystemExit) as error:
        raise TokenError(f"the credentials' callable raised {type(error).__name__}: {error}") from error
    token = found.strip() if isinstance(found, str) else ""
    wrong = (
        _find_flaw(token)
        if token
        else f"is {'empty' if isinstance(found, str) else f'a {type(found).__name__}'}"
    )
    if wrong:
        raise TokenError(f"the return value of the credentials' callable {wrong}: return a token")
    return token


def _read_file(file: str) -> str:
    """Read a file with a single token, without surrounding space.

    Raises TokenError.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TokenError(f"the token file {file} is no regular file: name a file with only the token")
            content = os.read(descriptor, 2 * TOKEN_BYTES_MAX)
        finally:
            os.close(descriptor)
    except TokenError:
        raise
    except (OSError, TypeError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise TokenError(f"the token file {file} can't be read: {cause}") from error
    token = content.decode("utf-8", errors="replace").strip()
    wrong = _find_flaw(token) if token else "is empty"
    if wrong:
        raise TokenError(f"the token file {file} {wrong}: write only the token into the file")
    return token
