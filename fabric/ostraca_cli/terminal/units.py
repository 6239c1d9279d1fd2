"""Sizes and durations for people: ``4GiB``, ``1.5 GB``, plain bytes, ``3 min 4 s``."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

from ostraca_fabric.errors import UsageError, shown

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "t": 1 << 40,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_NAMES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_CHARACTERS_MAX = 64
"""Maximum length of a size, because Python refuses to parse very long digits."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Parse a size in bytes: ``KiB`` and ``K`` count in 1024, ``kB`` in 1000.

    Raises UsageError with the correct form.
    """
    found = _SIZE.fullmatch(text.strip()) if len(text) <= _CHARACTERS_MAX else None
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise UsageError(
            f"{shown(text)} is no size: write bytes, or a number with a unit, as in 512MiB or 4GiB"
        )
    exact = Fraction(found[1]) * unit
    if exact.denominator != 1:
        raise UsageError(f"{text!r} is no whole number of bytes: use a smaller unit")
    return int(exact)


def size_argument(text: str) -> int:
    """Parse a size for argparse, which shows the message with the option's name."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size_text(size_bytes: int) -> str:
    """Write bytes in the largest unit with a value of at least 1: ``4.0 GiB``, ``17 bytes``."""
    for unit_bytes, name in _NAMES:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {name}"
    return f"{size_bytes} bytes"


_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400


def duration_text(seconds: float) -> str:
    """Write a duration in at most two units: ``17 s``, ``3 min 4 s``, ``2 d 5 h``."""
    whole = int(seconds)
    if whole >= _DAY_S:
        return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s" if whole >= _MINUTE_S else f"{whole} s"
