"""Meaning of etcd's errors for the caller. No other module inspects them."""

from __future__ import annotations

from enum import Enum, auto

import grpc

from ostraca_fabric.errors import LeaseEndedError, MembershipError, NotAllowedError, StoreAwayError, shown


class Remedy(Enum):
    """Reaction to a failed call."""

    ASK_ANOTHER = auto()
    """The member cannot answer now: wait, then ask the next member. The member may have executed the call."""

    LOG_IN = auto()
    """The token is no longer valid: log in and repeat. Tokens end after minutes, and with the member that
    issued them."""

    GIVE_UP = auto()
    """Repetition would not help."""


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
"""Length of shown text from grpc, which begins with the connection and ends with the cause."""

_LAST = "last error: "
"""Text of grpc before the last cause of a failed connection."""

_NO_TLS_THERE = "no TLS at that port: leave out etcd.ca, or have etcd listen at https://"
_NOT_TRUSTED = (
    "etcd accepts no client without a valid certificate: check etcd.cert and etcd.key, the expiry date, and "
    "that etcd trusts the signing CA"
)
_NOT_THERE = "check that etcd runs there, and check --etcd or etcd.endpoints"
_TLS_ADVICE = (
    ("certificate has expired", "etcd's certificate has expired: renew the certificate"),
    ("Hostname Verification", "etcd's certificate does not carry that host: use a host in the certificate"),
    ("CERTIFICATE_VERIFY_FAILED", "etcd's certificate is not signed by a CA in etcd.ca: check the file"),
    ("_ALERT_", _NOT_TRUSTED),
    ("Handshake read failed", _NO_TLS_THERE),
    ("WRONG_VERSION_NUMBER", _NO_TLS_THERE),
    (
        "Socket closed",
        "etcd closed the connection: if etcd requires TLS, set etcd.ca, etcd.cert and etcd.key",
    ),
)
"""Parts of error texts from grpc and TLS, with remedies. The member is still asked again, because an operator
may repair or replace a member."""


def remedy(error: grpc.RpcError) -> Remedy:
    """Return the reaction to a failed call."""
    code, words = code_of(error), words_of(error)
    if any(part in words for part in _TOKEN_IS_OLD):
        return Remedy.LOG_IN
    if code in _TRANSIENT or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and _IS_BUSY in words):
        return Remedy.ASK_ANOTHER
    return Remedy.GIVE_UP


def in_words(error: grpc.RpcError, *, asked: str, at: str) -> MembershipError:
    """Return the error for an operator: action, member, and remedy."""
    code, words = code_of(error), words_of(error)
    if _LEASE_HAS_ENDED in words:
        return LeaseEndedError(f"etcd at {at} did not {asked}: the lease of the record has ended")
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
    """Return the status of a failed call."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def words_of(error: grpc.RpcError) -> str:
    """Return the error text of the other end."""
    details = error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    return details or str(error)


def _shown(words: str) -> str:
    return shown(words, _WORDS_CHARACTERS_MAX)
