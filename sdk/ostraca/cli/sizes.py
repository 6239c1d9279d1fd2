"""Sizes as people write them: ``4GiB``, ``512MiB``, ``1.5 GB``, plain bytes."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

from ostraca_fabric.errors import UsageError

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
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return bytes. ``KiB`` and its like, and ``K``, count in 1024; ``kB`` and its like in 1000.

    Raises UsageError that says how a size is written.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise UsageError(
            f"{text!r} is no size: write a number of bytes, or one with a unit, as in 512MiB or 4GiB"
        )
    exact = Fraction(found[1]) * unit
    if exact.denominator != 1:
        raise UsageError(f"{text!r} is no whole number of bytes: write it in a smaller unit")
    return int(exact)


def size_argument(text: str) -> int:
    """As ``parse_size``, for argparse, which shows the message with the option's name."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size_text(size_bytes: int) -> str:
    """Write bytes for people, in the largest unit that gives at least one: ``4.0 GiB``, ``17 bytes``."""
    for unit_bytes, name in _NAMES:
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:.1f} {name}"
    return f"{size_bytes} bytes"
