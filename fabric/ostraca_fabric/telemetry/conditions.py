"""Health conditions of a daemon besides readiness. Pure.

A condition is phrased as the good case: ``is_true`` means healthy, and alerts fire on false. Only ``ready``
decides whether the daemon receives work. A full cache or an unreachable membership store needs attention, but
is no reason to send work elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

READY = "ready"
"""Name of the condition for readiness to receive work."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Present state of a condition."""

    name: str
    is_true: bool
    sentence: str
    """The state and its consequence."""


class Condition(msgspec.Struct, frozen=True):
    """Condition and the time since its last change."""

    name: str
    is_true: bool
    since_s: float
    """Age of the first observation of this state. The change may date back to the observation before."""

    sentence: str


class Conditions:
    """Record of the last change of each condition."""

    def __init__(self) -> None:
        """Start without any condition."""
        self._known: dict[str, tuple[bool, float]] = {}

    def after(self, now_s: float, observed: Iterable[Observation]) -> tuple[Condition, ...]:
        """Record the present observations and return all conditions.

        *now_s* never decreases.
        """
        found = []
        for each in observed:
            was, since_s = self._known.get(each.name, (not each.is_true, now_s))
            if was != each.is_true:
                since_s = now_s
            self._known[each.name] = each.is_true, since_s
            found.append(Condition(each.name, each.is_true, now_s - since_s, each.sentence))
        return tuple(found)


def is_ready(conditions: Iterable[Condition]) -> bool:
    """Return whether the daemon can receive work."""
    return any(each.name == READY and each.is_true for each in conditions)
