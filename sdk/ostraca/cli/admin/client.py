"""Asks an admin service over HTTP: one connection for each question, nothing but the standard library.

The token is sent to loopback or over TLS, and nowhere else. Answers are left as they came: ``answers`` reads
them for people, ``--json`` prints them.
"""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

from ostraca.cli.admin.answers import Page, Problem, read
from ostraca.cli.admin.errors import AdminAwayError, AdminRefusedError, BadRequestError, NotNowError
from ostraca.cli.admin.options import DEFAULT_URL, TOKEN_VARIABLE, URL_VARIABLE
from ostraca.cli.admin.text import printable
from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.wire.address import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ANSWER_BYTES_MAX = 64 << 20
"""Longest answer that is read; a page of 2,000 shards takes less than one of these."""

PAGE = 500
SILENCE_S = 45.0
"""How long a stream of events may say nothing: three times what the service leaves between two words."""

_NOT_NOW = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)
_BAD_REQUEST = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_EVENTS = "text/event-stream"
_JSON_TYPES = ("application/json", "application/problem+json")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service answered, of 200 and a little."""

    body: bytes
    """JSON, in one line."""

    etag: str


class AdminClient:
    """Asks one admin service."""

    def __init__(self, url: str, *, token: str, ca: Path | None, timeout_s: float) -> None:
        """Ask at *url* with a bearer *token*. Nothing is sent yet.

        Over https its certificate has to be signed by *ca*, else by what this machine trusts. Each wait for
        the other end takes *timeout_s* at most. Raises UsageError that says what to write instead.
        """
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.username:
            raise UsageError(f"{url!r} is no URL of an admin service: write it as in {DEFAULT_URL}")
        self._is_tls = parts.scheme == "https"
        if not self._is_tls and not (self._host == "localhost" or is_loopback(self._host)):
            raise UsageError(
                f"{url} is another machine, where the token would cross in the clear: write https://"
            )
        self.url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._context = _context(ca) if self._is_tls else None

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Answer:
        """Read something. Raises as ``ask``."""
        return self.ask("GET", f"{path}?{urlencode(query)}" if query else path)

    def ask(self, method: str, path: str, body: object = None, *, if_match: str = "") -> Answer:
        """Ask for *path*, sending *body* as JSON, only if what it is about has this ETag still.

        Raises AdminAwayError, and AdminRefusedError or one of its kinds.
        """
        headers = self._headers("application/json")
        if if_match:
            headers["If-Match"] = f'"{if_match}"' if if_match.isdigit() else if_match
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        with closing(self._connection()) as connection:
            try:
                connection.request(method, self._base + path, data, headers)
                answer = connection.getresponse()
                content = answer.read(ANSWER_BYTES_MAX + 1)
            except (OSError, http.client.HTTPException) as error:
                raise self._away(error) from error
        self._check(answer, content)
        return Answer(content, answer.headers.get("ETag", "").strip('"'))

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[tuple[str, bytes]]]:
        """Have server-sent events told, each as its kind and its data, until the service ends them.

        They are as WHATWG's HTML says (section 9.2), with data of one line. Raises as ``ask``, at once and
        from the iterator.
        """
        with closing(self._connection()) as connection:
            try:
                connection.connect()
                own = connection.sock
                connection.request("GET", self._base + path, headers=self._headers(_EVENTS))
                answer = connection.getresponse()
                is_stream = answer.headers.get_content_type() == _EVENTS
                content = b"" if is_stream else answer.read(ANSWER_BYTES_MAX + 1)
                own.settimeout(SILENCE_S)
            except (OSError, http.client.HTTPException) as error:
                raise self._away(error) from error
            if not is_stream:
                self._check(answer, content)
                raise self._is_no_admin(answer)
            yield self._events(answer)

    def pages(self, path: str, *, after: str = "") -> Iterator[bytes]:
        """Read all pages of a list, each when it is asked for. Raises as ``ask``."""
        while True:
            body = self.get(path, {"limit": PAGE, **({"after": after} if after else {})}).body
            yield body
            after = read(body, Page).next
            if not after:
                return

    def _events(self, stream: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
        kind, data = "", b""
        try:
            while line := stream.readline(ANSWER_BYTES_MAX):
                name, _, value = line.rstrip(b"\r\n").partition(b":")
                match name:
                    case b"event":
                        kind = value.removeprefix(b" ").decode(errors="replace")
                    case b"data":
                        data = value.removeprefix(b" ")
                    case b"" if not value:
                        if data:
                            yield kind, data
                        kind, data = "", b""
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error, SILENCE_S) from error

    def _headers(self, accept: str) -> dict[str, str]:
        token = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return {"Accept": accept, **token}

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context
        )

    def _away(
        self, error: OSError | http.client.HTTPException, waited_s: float | None = None
    ) -> AdminAwayError | ConnectError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return ConnectError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}): give the file of "
                "the CA that signed it with --tls-ca"
            )
        if isinstance(error, ssl.SSLError):
            return ConnectError(f"{self.url} does not speak TLS as we do ({error.reason}): is it http://?")
        if isinstance(error, TimeoutError):
            why = f"nothing was heard for {waited_s or self._timeout_s:g} s"
        elif isinstance(error, OSError):
            why = error.strerror or str(error) or type(error).__name__
        else:
            why = f"it does not speak HTTP: {printable(str(error)) or type(error).__name__}"
        hint = (
            "is it https://?" if isinstance(error, http.client.HTTPException | ConnectionResetError) else ""
        )
        return AdminAwayError(
            f"no admin service answers at {self.url} ({why}): "
            + (hint or "start one by `ostraca serve admin`, or say where one is")
            + f" (--admin URL, or {URL_VARIABLE})"
        )

    def _is_no_admin(self, answer: http.client.HTTPResponse) -> AdminRefusedError:
        return AdminRefusedError(
            answer.status,
            f"what {self.url} answers ({answer.status} {printable(answer.reason)}) is not what an admin "
            f"service says: is it one? (--admin URL, or {URL_VARIABLE})",
        )

    def _check(self, answer: http.client.HTTPResponse, content: bytes) -> None:
        """Raise what a refusal means."""
        is_json = answer.headers.get_content_type() in _JSON_TYPES
        if not is_json or len(content) > ANSWER_BYTES_MAX:
            raise self._is_no_admin(answer)
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return
        problem = read(content, Problem)
        why = printable(problem.detail or problem.title or answer.reason)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            refused = "does not know this token" if self._token else "wants to know who asks"
            raise AdminRefusedError(
                answer.status,
                f"the admin service at {self.url} {refused}: give a token of its file of people, with "
                f"--token-file FILE, or in {TOKEN_VARIABLE}",
            )
        if answer.status in _NOT_NOW:
            raise NotNowError(answer.status, why)
        if answer.status in _BAD_REQUEST:
            raise BadRequestError(answer.status, why)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise AdminAwayError(f"the admin service at {self.url} can't do it now: {why}")
        raise AdminRefusedError(answer.status, why)


def quoted(name: str) -> str:
    """Return a name as it stands in a path."""
    return quote(name, safe="")


def _context(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{ca} is no file of a CA's certificate: {error}") from error
