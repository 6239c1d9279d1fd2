"""KV hints of a request, as far as the fabric can follow.

An orchestrator attaches versioned actions to a request. Action types are those of Dynamo, vLLM and SGLang:
``kv.prefetch``, ``kv.retain`` and ``kv.deref``, all of major version 1. Unknown and malformed actions are
ignored: a hint never fails a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

_VERSION = "1"
_TTL_MAX_S = 30 * 24 * 3600.0
"""Longest duration with an effect; chunks leave flash sooner anyway."""


class HintAction(Protocol):
    """Action as in vLLM's envelope."""

    @property
    def action_type(self) -> str:
        """Name of the action."""

    @property
    def action_version(self) -> str:
        """Version of the payload."""

    @property
    def payload(self) -> dict[str, Any]:
        """Arguments of the action."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """Hints of one request."""

    has_prefetch: bool = False
    """Whether the request's chunks go to the agent's memory ahead of the load."""

    ttl_s: float | None = None
    """Time for which stored chunks are worth keeping; None without a limit."""

    is_session_end: bool = False
    """Whether no request of the session follows this one."""


def parse_hints(actions: Iterable[HintAction]) -> RequestHints:
    """Read the actions of a request."""
    by_type = {action.action_type: action for action in actions if _is_supported(action)}
    retain = by_type.get("kv.retain")
    return RequestHints(
        has_prefetch="kv.prefetch" in by_type,
        ttl_s=_longest_s(retain.payload) if retain else None,
        is_session_end="kv.deref" in by_type,
    )


def _is_supported(action: HintAction) -> bool:
    return str(action.action_version).split(".", 1)[0] == _VERSION


def _longest_s(payload: dict[str, Any]) -> float | None:
    """Return the longest duration of the directives that protect tokens.

    A put has one duration for all its blocks, so the longest wins. Without a duration, protection never ends.
    """
    directives = payload.get("directives")
    longest_s = 0.0
    for directive in directives if isinstance(directives, list) else ():
        if not isinstance(directive, dict) or not directive.get("priority"):
            continue
        duration_s = directive.get("duration")
        if isinstance(duration_s, bool) or not isinstance(duration_s, int | float):
            duration_s = inf
        longest_s = max(longest_s, duration_s)
    return longest_s if 0 < longest_s <= _TTL_MAX_S else None
