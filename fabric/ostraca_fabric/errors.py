"""Every error that Ostraca raises on purpose.

An expected outcome (a miss, a full drive, a late answer) is a value, never one of these::

    OstracaError
    ├── UsageError               the caller passed something that can't be used (also a ValueError)
    ├── ConnectError             no agent could be reached, or it refused
    │   ├── AuthenticationError
    │   └── VersionError
    ├── ClosedError              used after close, or after fork
    ├── RefusedError             the agent refused one request
    │   ├── OlderAgentError
    │   ├── UnknownVolumeError
    │   └── LayoutMismatchError
    ├── ProtocolError            the other end broke the wire's rules
    │   ├── FrameTooLongError
    │   └── MalformedError
    ├── TransportError           the data plane can't be set up
    ├── DriveError               a drive did not do what it was asked
    ├── FormatError              what lies on flash isn't ours to use
    └── MembershipError          the membership store can't be reached or refused
        ├── StoreAwayError       the membership store did not answer in time
        ├── WrongStoreError      it answers, and what lies there is not the fabric that is meant
        │   └── OtherFabricError
        ├── PlacementBusyError   too many placement epochs are still asked
        ├── BlocksTooLargeError  a volume's largest block fits no segment of some shard
        ├── NamesakeError        another process is already what this one would be
        ├── ChangedError         what a change was decided on is not so any more
        ├── NotAllowedError      the membership store's access control forbids it
        └── LeaseEndedError      the agent is no longer in the fabric
"""

from __future__ import annotations

_SHOWN_CHARACTERS = 64


def shown(text: str, characters_max: int = _SHOWN_CHARACTERS) -> str:
    """Return text of someone else's as it can stand in a message or a log line: quoted, and not at length.

    What it holds can then neither begin a line of its own, nor drive a terminal, nor make a refusal longer
    than its reader takes.
    """
    quoted = ascii(text[: characters_max + 1])
    return quoted if len(quoted) <= characters_max + 2 else f"{quoted[:characters_max]}...'"


class OstracaError(Exception):
    """Something in Ostraca went wrong."""


class UsageError(OstracaError, ValueError):
    """The caller passed something that can't be used; the message says what to pass instead."""


class ConnectError(OstracaError, ConnectionError):
    """No agent could be reached, or the one reached refused the connection."""


class AuthenticationError(ConnectError):
    """The agent did not accept who this says it is."""


class VersionError(ConnectError):
    """The two ends speak no common version of the wire."""


class ClosedError(OstracaError):
    """The client was closed, lost its agent for good, or crossed a fork."""


class RefusedError(OstracaError):
    """The agent refused one request; the connection goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OlderAgentError(RefusedError):
    """The agent is of an older release, which does not know the question: upgrade it."""

    def __init__(self, message: str) -> None:
        super().__init__("older", message)


class UnknownVolumeError(RefusedError):
    """No volume of this name belongs to this tenant."""


class LayoutMismatchError(RefusedError):
    """The volume exists with another layout or block size; bytes would have another meaning."""


class ProtocolError(OstracaError):
    """The other end broke the rules of the wire; its connection is closed, no other is harmed."""

    code = "protocol"


class FrameTooLongError(ProtocolError):
    """A frame announced more bytes than the limit agreed in the handshake."""

    code = "frame_too_long"


class MalformedError(ProtocolError):
    """A frame's bytes are not a message of a type known here."""

    code = "malformed"


class TransportError(OstracaError):
    """The data plane between a worker and its agent can't be set up or used."""


class DriveError(OstracaError):
    """A drive did not do what it was asked; what was read is not to be used, what was written may be lost."""


class FormatError(OstracaError):
    """What lies on the drive is not a shard this fabric may use; the message says what it is and what to
    do.
    """


class MembershipError(OstracaError):
    """The membership store can't be reached, or refused a change."""


class StoreAwayError(MembershipError):
    """The membership store did not answer in time; asked again later, it may. What it was asked to change may
    have been changed.
    """


class WrongStoreError(MembershipError):
    """The membership store answers, and what lies there can't be believed: no fabric, or another than is
    meant, or one of a newer release.
    """


class OtherFabricError(WrongStoreError):
    """The membership store has another fabric than the one that is meant."""

    def __init__(self, message: str, fabric: bytes) -> None:
        super().__init__(message)
        self.fabric = fabric
        """The id of the one that it has."""


class PlacementBusyError(MembershipError):
    """As many placement epochs as may be are still asked: blocks of the oldest would be lost to look-ups."""


class BlocksTooLargeError(MembershipError):
    """A volume's largest block fits no segment of some shard, so the one that came second is refused."""


class NamesakeError(MembershipError):
    """Another process, not known to have ended, is already what this one would be in the fabric."""


class ChangedError(MembershipError):
    """Somebody else has changed meanwhile what this change was decided on: look again, and decide anew."""


class NotAllowedError(MembershipError):
    """The membership store does not let our user of it read, or write, what was asked for."""


class LeaseEndedError(MembershipError):
    """The lease that keeps an agent in the fabric has ended: its claims are gone, and it must join again."""
