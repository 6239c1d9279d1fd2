"""TLS for connections: contexts made from files, with hot reload, and error texts.

Agents show certificates to each other, and accept certificates signed by the fabric's CA. During the TLS
handshake a client's certificate is optional; ``ostraca_fabric.wire.handshake`` requires certificates where
necessary. A server's certificate must carry the dialled host. A connection keeps its original files. New
connections use the current files, or the previous files if the current are unusable.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ostraca_fabric.errors import UsageError
from ostraca_fabric.runtime.file_reload import ReloadedFiles
from ostraca_fabric.runtime.os_errors import explained

_ROUND_TRIPS = 3
"""Maximum of a handshake: TLS 1.3 takes two."""

_NOT_YET, _EXPIRED, _OTHER_PURPOSE, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 26, 62, 64
"""Certificate errors of OpenSSL (X509_V_ERR_...)."""

_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end asks for a certificate of ours: give one, and its "
    "key",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know the CA that signed our certificate: take one that "
    "the fabric's CA has signed",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our own certificate has expired: renew it",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end does not accept our certificate: take one that the "
    "fabric's CA has signed",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS there: is it tcp://?",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end does not speak TLS 1.3",
}

HUNG_UP = (
    "the other end closed the connection: see its log. It may refuse our certificate, require one, or speak "
    "no TLS"
)
"""Message for a TLS connection that ends silently. Python's event loop closes a connection before sending the
alert for a refused certificate."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of an end: certificate, key and trusted CAs. All are PEM."""

    ca: Path
    """CA certificates for the verification of other ends. Use a CA for the fabric's agents alone, or list the
    agents in ``Access.agent_names``: otherwise any certificate of the CA may act as an agent."""

    cert: Path | None = None
    """Our certificate, followed by intermediate certificates up to the CA; None without a certificate."""

    key: Path | None = None
    """Private key of the certificate, not encrypted."""

    def __post_init__(self) -> None:
        """Refuse a certificate without a key, or a key without a certificate."""
        if (self.cert is None) != (self.key is None):
            raise UsageError("a certificate and its key go together: give both files, or neither")

    @property
    def paths(self) -> list[Path]:
        """The files given."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]


class Tls:
    """TLS contexts of an end."""

    def __init__(self, files: TlsFiles, hosts: Sequence[str] = (), *, peer_name: str = "") -> None:
        """Read the files.

        *hosts* are the names dialled by others: our certificate must be valid for each. *peer_name* is the
        name that other ends' certificates carry, in place of the dialled host. Raises UsageError for unusable
        files, or for a certificate invalid for a host.
        """
        self.peer_name = peer_name
        self._files = files
        self._hosts = tuple(hosts)
        self._contexts = ReloadedFiles(self._files.paths, self._made)

    @property
    def listening(self) -> ssl.SSLContext:
        """Context for incoming connections; requires a certificate."""
        assert self._files.cert is not None, "who listens shows a certificate"
        return self._contexts.current()[0]

    @property
    def dialling(self) -> ssl.SSLContext:
        """Context for outgoing connections."""
        return self._contexts.current()[1]

    @property
    def has_certificate(self) -> bool:
        """Whether incoming connections are possible."""
        return self._files.cert is not None

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            for path in self._files.paths:
                path.stat()  # unlike an error of ssl, this error names the file
        except OSError as error:
            raise UsageError(f"a file of TLS can't be read: {explained(error)}") from error
        listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            for context in (listening, dialling):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                if self._files.cert is not None:
                    context.load_cert_chain(self._files.cert, self._files.key, password=_no_password)
                context.load_verify_locations(self._files.ca)
        except (OSError, ValueError) as error:
            files = ", ".join(map(str, self._files.paths))
            raise UsageError(f"TLS can't be set up with {files}: {error}") from error
        listening.verify_mode = ssl.CERT_OPTIONAL
        for host in self._hosts:
            try:
                _shake_hands(listening, dialling, host)
            except ssl.SSLError as error:
                raise UsageError(
                    f"{self._files.cert} will not do for tls://{host}, by {self._files.ca}: {in_words(error)}"
                ) from error
        return listening, dialling


def in_words(error: OSError) -> str:
    """Describe an error of a TLS connection, with the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{_doubt(error)} ({error.verify_message})"
    if isinstance(error, ssl.SSLEOFError):
        return HUNG_UP
    if isinstance(error, ssl.SSLError) and error.reason is not None:
        return f"{_ALERTS.get(error.reason, 'TLS failed')} ({error.reason})"
    return str(error) or type(error).__name__


def _doubt(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "the certificate shown has expired: renew it"
        case code if code == _NOT_YET:
            return "the certificate shown is not valid yet: check the clocks of both hosts"
        case code if code == _OTHER_PURPOSE:
            return "the certificate shown is not made for this end: renew it for servers and clients"
        case code if code in (_OTHER_HOST, _OTHER_ADDRESS):
            return (
                "the certificate shown does not carry that host: dial one that it carries, or renew it with "
                "this one"
            )
        case _:
            return "the certificate shown is not signed by a CA that is known here: check the file of CAs"


def _shake_hands(listening: ssl.SSLContext, dialling: ssl.SSLContext, host: str) -> None:
    """Perform a handshake in memory. Raises SSLError if an end refuses the other."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        dialling.wrap_bio(back, there, server_hostname=host),
        listening.wrap_bio(there, back, server_side=True),
    )
    for _ in range(_ROUND_TRIPS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def _no_password() -> str:
    raise UsageError("the private key is encrypted: store it without a password, readable by the agent alone")
