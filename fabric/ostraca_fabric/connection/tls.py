"""TLS for connections: contexts made of files, and made anew when the files have changed.

Both ends show a certificate and accept those that the fabric's CA has signed; of those who connect, only the
ones that must have one are asked for it later (``ostraca_fabric.wire.handshake``). The certificate of who
listens must carry the host that was dialled. A connection keeps what it was made with; new ones use what the
files hold then. Files that can't be used any more leave the last ones that could in use, with a word in the
log: a certificate that is replaced in the wrong order must not end a fabric.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from ostraca_fabric.errors import UsageError
from ostraca_fabric.wire.handshake import Secured

log = logging.getLogger(__name__)

_Versions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where an end's certificate lies. All are PEM."""

    cert: Path
    """The certificate, and behind it those between it and the CA."""

    key: Path
    """Its private key, not encrypted."""

    ca: Path
    """Certificates that sign those of other ends. Have one CA for the fabric's agents alone, or name the
    agents in ``Access.agent_names``: else whoever has a certificate of it may be an agent."""


class Tls:
    """What an end shows and accepts."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises UsageError when they can't be used."""
        self._files = files
        self._versions = self._seen()
        self._contexts = self._made()

    @property
    def listening(self) -> ssl.SSLContext:
        """For a connection that somebody makes to us."""
        return self._current()[0]

    @property
    def dialling(self) -> ssl.SSLContext:
        """For a connection that we make."""
        return self._current()[1]

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            versions = self._seen()
            if versions != self._versions:
                self._versions = versions
                self._contexts = self._made()
                log.info("Took the changed certificate %s", self._files.cert)
        except UsageError as error:
            log.warning("Going on with the certificates of before: %s", error)
        return self._contexts

    def _seen(self) -> _Versions:
        try:
            found = [path.stat() for path in (self._files.cert, self._files.key, self._files.ca)]
        except OSError as error:
            raise UsageError(f"a file of TLS can't be read: {error}") from error
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            for context in (listening, dialling):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.load_cert_chain(self._files.cert, self._files.key, password=_no_password)
                context.load_verify_locations(self._files.ca)
        except (OSError, ValueError) as error:
            files = f"{self._files.cert}, {self._files.key} and {self._files.ca}"
            raise UsageError(f"TLS can't be set up with {files}: {error}") from error
        listening.verify_mode = ssl.CERT_OPTIONAL
        return listening, dialling


def secured(transport: asyncio.BaseTransport) -> Secured | None:
    """Return what TLS says of the other end; None where there is no TLS."""
    shown: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    if shown is None:
        return None
    certificate = shown.getpeercert()
    if not certificate:
        return Secured(None)
    names = {str(entry[1]) for entry in certificate.get("subjectAltName", ())}
    subject = certificate.get("subject", ())
    names.update(str(part[1]) for named in subject for part in named if part[0] == "commonName")
    return Secured(frozenset(names))


def _no_password() -> str:
    raise UsageError("the private key is encrypted: store it without a password, readable by the agent alone")
