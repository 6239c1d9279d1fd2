"""TLS for connections: contexts made of files, made anew when the files have changed, and what errors mean.

Agents show a certificate to each other, and accept those that the fabric's CA has signed; of those who
connect, only the ones that must have one are asked for it later (``ostraca_fabric.wire.handshake``). The
certificate of who listens must carry the host that was dialled. A connection keeps what it was made with; new
ones use what the files hold then, or, where those can't be used, what they held before.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.errors import UsageError
from ostraca_fabric.made_of_files import MadeOfFiles

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ROUND_TRIPS = 3
"""Of a handshake: TLS 1.3 takes two."""

_NOT_YET, _EXPIRED, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 62, 64
"""What OpenSSL may find wrong with a certificate (X509_V_ERR_...)."""

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
    "it hung up: it may not accept our certificate, or want one, which its log says, or speak no TLS there"
)
"""What is to be said of a connection over TLS that ends without a word. Python's event loop closes a
connection whose certificate it refuses before the alert is sent."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where an end's certificate lies, and whom it believes. All are PEM."""

    ca: Path
    """Certificates that sign those of other ends. Have one CA for the fabric's agents alone, or name the
    agents in ``Access.agent_names``: else whoever has a certificate of it may be an agent."""

    cert: Path | None = None
    """Our certificate, and behind it those between it and the CA; None for who shows none."""

    key: Path | None = None
    """Its private key, not encrypted."""

    def __post_init__(self) -> None:
        """Refuse half of a pair."""
        if (self.cert is None) != (self.key is None):
            message = "a certificate and its key go together: give both files, or neither"
            raise UsageError(message)


class Tls:
    """What an end shows and accepts."""

    def __init__(self, files: TlsFiles, hosts: Sequence[str] = ()) -> None:
        """Read the files. *hosts* is where others dial us: our certificate must do for each of them.

        Raises UsageError when the files can't be used, or our certificate would not do there.
        """
        self._files = files
        self._hosts = tuple(hosts)
        self._contexts = MadeOfFiles(self._paths(), self._made)

    @property
    def listening(self) -> ssl.SSLContext:
        """For a connection that somebody makes to us; we must have a certificate."""
        assert self._files.cert is not None, "who listens shows a certificate"
        return self._contexts.current()[0]

    @property
    def dialling(self) -> ssl.SSLContext:
        """For a connection that we make."""
        return self._contexts.current()[1]

    @property
    def has_certificate(self) -> bool:
        """Whether we can listen."""
        return self._files.cert is not None

    def _paths(self) -> list[Path]:
        return [path for path in (self._files.ca, self._files.cert, self._files.key) if path is not None]

    def _made(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            for path in self._paths():
                path.stat()  # for its error names the file, which those of ssl don't
        except OSError as error:
            raise UsageError(f"a file of TLS can't be read: {error}") from error
        listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            for context in (listening, dialling):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                if self._files.cert is not None:
                    context.load_cert_chain(self._files.cert, self._files.key, password=_no_password)
                context.load_verify_locations(self._files.ca)
        except (OSError, ValueError) as error:
            files = ", ".join(map(str, self._paths()))
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
    """Say what went wrong with a connection over TLS, and what to do about it."""
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
        case code if code in (_OTHER_HOST, _OTHER_ADDRESS):
            return (
                "the certificate shown does not carry that host: dial one that it carries, or renew it with "
                "this one"
            )
        case _:
            return "the certificate shown is not signed by a CA that is known here: check the file of CAs"


def _shake_hands(listening: ssl.SSLContext, dialling: ssl.SSLContext, host: str) -> None:
    """Let one end meet the other in memory. Raises SSLError when either does not accept what it is shown."""
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
