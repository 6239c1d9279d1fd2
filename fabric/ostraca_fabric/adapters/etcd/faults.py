"""What etcd's errors mean for the one who asked. The only place that looks into them."""

from __future__ import annotations

from enum import Enum, auto

import grpc

from ostraca_fabric.errors import LeaseEndedError, MembershipError, NotAllowedError, StoreAwayError, shown


class Remedy(Enum):
    """What to do about a call that failed."""

    ASK_ANOTHER = auto()
    """This member can't answer now: ask the next one, after a wait. Whether it did what it was asked is
    unknown."""

    LOG_IN = auto()
    """The token is no good any more (tokens end after minutes, and with the member that made them): get a new
    one and ask again."""

    GIVE_UP = auto()
    """Asking again would not help."""


_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # no connection, no leader, the leader has changed
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,  # the member ended the call when it was stopped
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,  # the connection was reset in the midst of an answer
        grpc.StatusCode.UNKNOWN,
    }
)
_TOKEN_IS_OLD = ("invalid auth token", "revision in header is old", "user name is empty")
_IS_FULL = "database space exceeded"
_IS_BUSY = "too many requests"
_LEASE_HAS_ENDED = "lease not found"
_WORDS_CHARACTERS_MAX = 200
"""How much is shown of what grpc says, which begins with who said it to whom, and ends with the cause."""

_LAST = "last error: "
"""What grpc says before what happened at last when it could not connect."""

_NO_TLS_THERE = "it speaks no TLS there: leave out etcd.ca, or have etcd listen at https://"
_NOT_TRUSTED = (
    "etcd does not accept our certificate, or that there is none: check etcd.cert and etcd.key, that it has "
    "not expired, and that etcd trusts the CA that signed it"
)
_NOT_THERE = "check that etcd runs there, and that --etcd or etcd.endpoints say where it is"
_TLS_ADVICE = (
    ("certificate has expired", "etcd's certificate has expired: renew it"),
    ("Hostname Verification", "etcd's certificate does not carry that host: name one that it carries"),
    ("CERTIFICATE_VERIFY_FAILED", "etcd's certificate is not signed by a CA in etcd.ca: check that file"),
    ("_ALERT_", _NOT_TRUSTED),
    ("Handshake read failed", _NO_TLS_THERE),
    ("WRONG_VERSION_NUMBER", _NO_TLS_THERE),
    ("Socket closed", "it hung up: if it takes TLS only, give etcd.ca, and what it asks for"),
)
"""Parts of what grpc and its TLS say when a connection fails, and what to do. A member may be put right, or
be replaced by one that is: so it is asked again all the same."""


def remedy(error: grpc.RpcError) -> Remedy:
    """Say what to do about a call's error."""
    code, words = code_of(error), words_of(error)
    if any(part in words for part in _TOKEN_IS_OLD):
        return Remedy.LOG_IN
    if code in _TRANSIENT or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and _IS_BUSY in words):
        return Remedy.ASK_ANOTHER
    return Remedy.GIVE_UP


def is_time_out(error: grpc.RpcError) -> bool:
    """Say whether a call got no answer in the time that it was given."""
    return code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED


def in_words(error: grpc.RpcError, *, asked: str, at: str) -> MembershipError:
    """Return the error an operator should read: what was asked of which member, and what to do."""
    code, words = code_of(error), words_of(error)
    if _LEASE_HAS_ENDED in words:
        return LeaseEndedError(f"etcd at {at} did not {asked}: the lease it was to be bound to has ended")
    if remedy(error) is Remedy.ASK_ANOTHER:
        advice = next((advice for part, advice in _TLS_ADVICE if part in words), _NOT_THERE)
        _, _, last = words.rpartition(_LAST)
        return StoreAwayError(f"etcd at {at} did not {asked} ({code.name}: {_shown(last)}): {advice}")
    advice = ""
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotAllowedError(
            f"etcd at {at} did not {asked} ({code.name}: {_shown(words)}): grant the user's role reading and "
            "writing of every key under the fabric's prefix"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED or "authentication failed" in words:
        advice = ": check etcd's user and password in the settings"
    elif any(part in words for part in _TOKEN_IS_OLD):
        advice = ": etcd's access control is on, name a user and its password in the settings"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        advice = ": is it an etcd? Have --etcd or etcd.endpoints say where etcd listens for clients"
    elif _IS_FULL in words:
        advice = ": compact and defragment etcd, then clear its alarm (etcdctl alarm disarm)"
    elif "not enabled" in words:
        advice = ": name no user in the settings, or turn etcd's access control on"
    return MembershipError(f"etcd at {at} did not {asked} ({code.name}: {_shown(words)}){advice}")


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """Return the status of a call that failed."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def words_of(error: grpc.RpcError) -> str:
    """Return what the other end said about it."""
    details = error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return details or str(error)


def _shown(words: str) -> str:
    return shown(words, _WORDS_CHARACTERS_MAX)
