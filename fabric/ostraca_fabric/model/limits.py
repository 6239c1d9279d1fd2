"""Checks of single values: settings of daemons, and arguments of callers. Pure.

The types of whole numbers, numbers, truth values and texts are decided here, once for all arguments.
"""

from __future__ import annotations

import operator
from numbers import Real

from ostraca_fabric.errors import UsageError, shown


def check_above_zero(settings: object, *names: str) -> None:
    """Refuse a time, size or rate of 0 or less. Raises UsageError."""
    for name in names:
        if not getattr(settings, name) > 0:  # in this form NaN is refused as well
            raise UsageError(f"{name} is {getattr(settings, name)}: make it more than 0")


def check_one_at_least(settings: object, *names: str) -> None:
    """Refuse a count below 1. Raises UsageError."""
    for name in names:
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} is {getattr(settings, name)}: make it 1 or more")


def whole(name: str, value: object, *, least: int, most: int) -> int:
    """Return a whole number as an int: integers of numpy and torch count, bool and whole floats do not.

    Raises UsageError for other types, and for numbers outside *least* to *most*.
    """
    if type(value) is not int:
        value = _index(name, value)
    if not least <= value <= most:
        raise UsageError(f"{name} is {value}: pass a whole number from {least} to {most}")
    return value


def _index(name: str, value: object) -> int:
    advice = f"{name} is {described(value)}: pass a whole number"
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise UsageError(advice)
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises for other types
    except Exception as error:
        raise UsageError(advice) from error


def number(name: str, value: object) -> float:
    """Return a number as a float: numbers of numpy count, bool does not. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} is {described(value)}: pass a number")
    try:
        return float(value)
    except OverflowError as error:
        raise UsageError(f"{name} has {len(str(value))} digits: pass a smaller number") from error


def flag(name: str, value: object) -> bool:
    """Return a truth value: bool, or numpy's. Raises UsageError."""
    if isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}:
        return bool(value)
    raise UsageError(f"{name} is {described(value)}: pass True or False")


def text(name: str, value: object, *, characters_max: int) -> str:
    """Return a text for the wire: a str of at most *characters_max* characters without surrogates.

    Raises UsageError for all other types: bytes, paths, data types of numpy and torch.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name} is {described(value)}: pass a str")
    if len(value) > characters_max:
        raise UsageError(f"{name} has {len(value)} characters: pass at most {characters_max}, a digest say")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is {shown(value)}, which is no Unicode text: pass a str without surrogates"
        ) from error
    return str.__str__(value)


def described(value: object) -> str:
    """Return a short form of any value for a message, with the type."""
    if isinstance(value, str):
        return shown(value)
    try:
        words = ascii(value)
    except Exception:  # noqa: BLE001 (of an object whose repr fails)
        words = "a value"
    return f"{words[:64]} of type {type(value).__name__}"
