"""Counting who is at something, for as long as that is so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections import Counter

Who = TypeVar("Who")


class Counted(Generic[Who]):
    """Counts somebody among others within a ``with``. It takes half of a ``contextmanager``'s time."""

    __slots__ = ("_counter", "_who")

    def __init__(self, counter: Counter[Who], who: Who) -> None:
        self._counter = counter
        self._who = who

    def __enter__(self) -> None:
        self._counter[self._who] += 1

    def __exit__(self, *_: object) -> None:
        subtract(self._counter, self._who, 1)


def subtract(counted: Counter[Who], who: Who, amount: int) -> None:
    """Forget who has nothing any more."""
    left = counted[who] - amount
    if left:
        counted[who] = left
    else:
        counted.pop(who, None)
