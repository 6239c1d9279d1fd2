"""HTTP client of the admin service, on the standard library alone.

Each request opens a connection. The client sends the token only to loopback or over TLS. Responses stay
undecoded: ``responses`` decodes them for people, ``--json`` prints them.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from ostraca_cli.commands.admin.errors import (
    AdminRefusedError,
    AdminUnavailableError,
    BadRequestError,
    StateConflictError,
)
from ostraca_cli.commands.admin.responses import PageInfo, ProblemInfo, printable, read
from ostraca_fabric.errors import ConnectError, UsageError
from ostraca_fabric.sockets.default_paths import ADMIN_TOKEN_VARIABLE, ADMIN_URL, ADMIN_URL_VARIABLE
from ostraca_fabric.wire.address import is_loopback

RESPONSE_BYTES_MAX = 64 << 20
"""Longest response read; a page of 2,000 shards takes less than 1 MiB."""

PAGE = 500
SILENCE_S = 45.0
"""Longest silence of an event stream: three times the service's interval between messages."""

_CONFLICT = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)
_BAD_REQUEST = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
_EVENTS = "text/event-stream"
_JSON_TYPES = ("application/json", "application/problem+json")


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """Successful response of the service."""

    body: bytes
    """JSON on a single line."""

    etag: str


class AdminClient:
    """Client of one admin service."""

    def __init__(self, url: str, *, token: str, ca: Path | None, timeout_s: float) -> None:
        """Prepare requests to *url* with a bearer *token*; sends nothing yet.

        Over https, *ca* must have signed the service's certificate; without *ca* the CAs of this machine
        apply. Each wait for the service takes at most *timeout_s*. Raises UsageError with the correct form of
        a wrong argument.
        """
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.username:
            raise UsageError(f"{url!r} is no URL of an admin service: write, for example, {ADMIN_URL}")
        self._is_tls = parts.scheme == "https"
        if not self._is_tls and not (self._host == "localhost" or is_loopback(self._host)):
            raise UsageError(
                f"{url} is another machine, and http:// would send the token in the clear: use https://"
            )
        self.url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self._context = _context(ca) if self._is_tls else None

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> AdminResponse:
        """Read a resource; raises the same errors as ``ask``."""
        return self.ask("GET", f"{path}?{urlencode(query)}" if query else path)

    def ask(self, method: str, path: str, body: object = None, *, if_match: str = "") -> AdminResponse:
        """Send a request for *path*, with *body* as JSON.

        With *if_match* the service executes the request only if the resource still has this ETag. Raises
        AdminUnavailableError, or AdminRefusedError or a subclass.
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
                response = connection.getresponse()
                content = response.read(RESPONSE_BYTES_MAX + 1)
            except (OSError, http.client.HTTPException) as error:
                raise self._unavailable(error) from error
        self._check(response, content)
        return AdminResponse(content, response.headers.get("ETag", "").strip('"'))

    @contextmanager
    def stream(self, path: str) -> Iterator[Iterator[tuple[str, bytes]]]:
        """Open a stream of server-sent events, until the service ends the stream.

        The iterator yields (kind, data) of each event. Events follow the WHATWG HTML standard, section 9.2,
        with data on one line. Raises the same errors as ``ask``, at once and from the iterator.
        """
        with closing(self._connection()) as connection:
            try:
                connection.connect()
                own = connection.sock
                connection.request("GET", self._base + path, headers=self._headers(_EVENTS))
                response = connection.getresponse()
                is_stream = response.headers.get_content_type() == _EVENTS
                content = b"" if is_stream else response.read(RESPONSE_BYTES_MAX + 1)
                own.settimeout(SILENCE_S)
            except (OSError, http.client.HTTPException) as error:
                raise self._unavailable(error) from error
            if not is_stream:
                self._check(response, content)
                raise self._no_admin_service(response)
            yield self._events(response)

    def pages(self, path: str, *, after: str = "") -> Iterator[bytes]:
        """Yield all pages of a list, each fetched on demand; raises like ``ask``."""
        while True:
            body = self.get(path, {"limit": PAGE, **({"after": after} if after else {})}).body
            yield body
            after = read(body, PageInfo).next
            if not after:
                return

    def _events(self, stream: http.client.HTTPResponse) -> Iterator[tuple[str, bytes]]:
        kind, data = "", b""
        try:
            while line := stream.readline(RESPONSE_BYTES_MAX):
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
            raise self._unavailable(error, SILENCE_S) from error

    def _headers(self, accept: str) -> dict[str, str]:
        token = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        return {"Accept": accept, **token}

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context
        )

    def _unavailable(
        self, error: OSError | http.client.HTTPException, waited_s: float | None = None
    ) -> AdminUnavailableError | ConnectError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return ConnectError(
                f"the certificate of {self.url} is not trusted ({error.verify_message}): give the file of "
                "the CA that signed it with --tls-ca"
            )
        if isinstance(error, ssl.SSLError):
            return ConnectError(f"no TLS connection to {self.url} ({error.reason}): try http://")
        if isinstance(error, TimeoutError):
            why = f"no response for {waited_s or self._timeout_s:g} s"
        elif isinstance(error, OSError):
            why = error.strerror or str(error) or type(error).__name__
        else:
            why = f"no HTTP: {printable(str(error)) or type(error).__name__}"
        is_other_protocol = isinstance(error, http.client.HTTPException | ConnectionResetError)
        advice = "try https://" if is_other_protocol else "start `ostraca serve admin`, or give another URL"
        return AdminUnavailableError(
            f"no admin service answers at {self.url} ({why}): {advice} (--admin URL, or {ADMIN_URL_VARIABLE})"
        )

    def _no_admin_service(self, response: http.client.HTTPResponse) -> AdminRefusedError:
        return AdminRefusedError(
            response.status,
            f"{self.url} is no admin service, by its response ({response.status} "
            f"{printable(response.reason)}): give another URL (--admin URL, or {ADMIN_URL_VARIABLE})",
        )

    def _check(self, response: http.client.HTTPResponse, content: bytes) -> None:
        """Raise the error of a refusal."""
        is_json = response.headers.get_content_type() in _JSON_TYPES
        if not is_json or len(content) > RESPONSE_BYTES_MAX:
            raise self._no_admin_service(response)
        if HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            return
        problem = read(content, ProblemInfo)
        why = printable(problem.detail or problem.title or response.reason)
        if response.status == HTTPStatus.UNAUTHORIZED:
            refused = "rejects this token" if self._token else "needs a token"
            raise AdminRefusedError(
                response.status,
                f"the admin service at {self.url} {refused}: give a token of its file of people, by "
                f"--token-file FILE or in {ADMIN_TOKEN_VARIABLE}",
            )
        if response.status in _CONFLICT:
            raise StateConflictError(response.status, why)
        if response.status in _BAD_REQUEST:
            raise BadRequestError(response.status, why)
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise AdminUnavailableError(f"the admin service at {self.url} is unavailable: {why}")
        raise AdminRefusedError(response.status, why)


def quoted(name: str) -> str:
    """Return a name escaped for use in a URL path."""
    return quote(name, safe="")


def _context(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{ca} has no CA certificate: {error}") from error
