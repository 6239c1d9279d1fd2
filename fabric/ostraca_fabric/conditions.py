"""Conditions: what an operator should know of a daemon beside whether it is ready. Pure.

A condition states the good case: ``is_true`` is as it should be, and an alert is on those that are not. Only
``ready`` decides whether work is sent here; a full cache or an unreachable membership store is something to
look at, and no reason to send work elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

READY = "ready"
"""The name of the condition that says whether work can be sent here."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How a condition is found to be now."""

    name: str
    is_true: bool
    sentence: str
    """What is the case, and what it means."""


class Condition(msgspec.Struct, frozen=True):
    """A condition, and for how long it has been so."""

    name: str
    is_true: bool
    since_s: float
    """How long ago it was first found so; it may have been so since the look before that."""

    sentence: str


class Conditions:
    """Remembers since when each condition has been as it is."""

    def __init__(self) -> None:
        """Begin with none known."""
        self._known: dict[str, tuple[bool, float]] = {}

    def after(self, now_s: float, observed: Iterable[Observation]) -> tuple[Condition, ...]:
        """Take in what is found now, and return the conditions. *now_s* never falls."""
        found = []
        for each in observed:
            was, since_s = self._known.get(each.name, (not each.is_true, now_s))
            if was != each.is_true:
                since_s = now_s
            self._known[each.name] = each.is_true, since_s
            found.append(Condition(each.name, each.is_true, now_s - since_s, each.sentence))
        return tuple(found)


def is_ready(conditions: Iterable[Condition]) -> bool:
    """Say whether work can be sent here."""
    return any(each.name == READY and each.is_true for each in conditions)
