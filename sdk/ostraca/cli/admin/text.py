"""Text of others as it can stand on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return text without what would drive a terminal: drives say their models and serials themselves."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
