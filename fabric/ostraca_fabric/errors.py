"""Exceptions raised on purpose by Ostraca.

An expected outcome (a miss, a full drive, a late answer) is a value, never an exception::

    OstracaError
    ├── UsageError               invalid argument of the caller (also a ValueError)
    ├── ResourceError            process limits below the needs of the process
    ├── ConnectError             no agent could be reached, or the agent refused
    │   ├── AuthenticationError
    │   ├── VersionError
    │   └── NoTransportError     (also a TransportError)
    ├── ClosedError              used after close, or after fork
    ├── RefusedError             the agent refused one request
    │   ├── OlderAgentError
    │   ├── UnknownVolumeError
    │   └── LayoutMismatchError
    ├── ProtocolError            the other end broke the wire protocol
    │   ├── FrameTooLongError
    │   └── MalformedError
    ├── TransportError           the data plane can't be set up
    │   └── NotInstalledError    ... because its package is not installed
    ├── DriveError               a drive failed an operation
    ├── FormatError              content of a drive that this fabric may not use
    └── MembershipError          the membership store is unreachable or refused
        ├── StoreAwayError       the membership store did not answer in time
        ├── WrongStoreError      the store answers, but does not hold the expected fabric
        │   └── OtherFabricError
        ├── PlacementBusyError   too many placement epochs are still queried
        ├── BlocksTooLargeError  a volume's largest block fits no segment of some shard
        ├── NamesakeError        another process already has this identity
        ├── ChangedError         the state behind a decision has changed
        ├── NotAllowedError      the membership store's access control forbids the access
        └── LeaseEndedError      the agent is no longer in the fabric
"""

from __future__ import annotations

from typing import Self

_SHOWN_CHARACTERS = 64


def shown(text: str, characters_max: int = _SHOWN_CHARACTERS) -> str:
    """Return foreign text for a message or a log line: quoted and shortened.

    Foreign text can then neither begin a line of its own, nor drive a terminal, nor exceed the reader's
    limit.
    """
    quoted = ascii(text[: characters_max + 1])
    return quoted if len(quoted) <= characters_max + 2 else f"{quoted[:characters_max]}...'"


class OstracaError(Exception):
    """Base class of all errors of Ostraca."""


class UsageError(OstracaError, ValueError):
    """Invalid argument of the caller; the message names a valid one."""


class ResourceError(OstracaError):
    """Limit of memory or descriptors below the needs of the process."""


class ConnectError(OstracaError, ConnectionError):
    """No agent could be reached, or the agent refused the connection."""


class AuthenticationError(ConnectError):
    """The agent did not accept the credentials."""


class VersionError(ConnectError):
    """The two ends have no common version of the wire protocol."""


class ClosedError(OstracaError):
    """The client was closed, lost its agent for good, or crossed a fork."""


class RefusedError(OstracaError):
    """The agent refused one request; the connection remains open."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Pickle, as for a process pool."""
        return type(self), (self.code, *self.args)


class OlderAgentError(RefusedError):
    """The agent's release is too old for the request: upgrade the agent."""

    def __init__(self, message: str) -> None:
        super().__init__("older", message)

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Pickle, as the base does."""
        return type(self), self.args


class UnknownVolumeError(RefusedError):
    """The tenant has no volume of this name."""


class LayoutMismatchError(RefusedError):
    """The volume exists with another layout or block size, so bytes have another meaning."""


class ProtocolError(OstracaError):
    """The other end broke the wire protocol; only its own connection is closed."""

    code = "protocol"


class FrameTooLongError(ProtocolError):
    """A frame announced more bytes than the limit agreed in the handshake."""

    code = "frame_too_long"


class MalformedError(ProtocolError):
    """A frame's bytes are no message of a known type."""

    code = "malformed"


class TransportError(OstracaError):
    """The data plane between a worker and its agent can't be set up or used."""


class NotInstalledError(TransportError):
    """The package of the chosen transport is not installed."""


class NoTransportError(ConnectError, TransportError):
    """None of the requested transports can be set up in this process."""


class DriveError(OstracaError):
    """A drive failed an operation: discard bytes read; bytes written may be lost."""


class FormatError(OstracaError):
    """Content of a drive that is no usable shard of this fabric.

    The message names the finding and the remedy.
    """


class MembershipError(OstracaError):
    """The membership store is unreachable, or refused a change."""


class StoreAwayError(MembershipError):
    """The membership store did not answer in time; a retry may succeed.

    The store may have applied the requested change.
    """


class WrongStoreError(MembershipError):
    """The membership store answers, but its content can't be trusted.

    The store holds no fabric, another fabric, or a fabric of a newer release.
    """


class OtherFabricError(WrongStoreError):
    """The membership store holds another fabric than expected."""

    def __init__(self, message: str, fabric: bytes) -> None:
        super().__init__(message)
        self.fabric = fabric
        """Id of the fabric in the store."""

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Pickle, as for a process pool."""
        return type(self), (*self.args, self.fabric)


class PlacementBusyError(MembershipError):
    """The maximum of placement epochs is queried: another would hide the oldest's blocks."""


class BlocksTooLargeError(MembershipError):
    """A volume's largest block fits no segment of some shard; the later of both is refused."""


class NamesakeError(MembershipError):
    """Another process, not known to have ended, already has this identity in the fabric."""


class ChangedError(MembershipError):
    """Another process has changed the state behind a decision: read again and decide anew."""


class NotAllowedError(MembershipError):
    """The membership store denies our user this read or write."""


class LeaseEndedError(MembershipError):
    """The agent's lease has ended: its claims are gone, and the agent must join again."""
