"""What a command is: its words for ``--help``, its options, and what it does."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Command:
    """One word after ``ostraca``.

    ``add_options`` fills the command's parser; ``run`` does the work and returns the exit code. Both must be
    cheap to import: what a command needs to run, it imports when it runs.
    """

    name: str
    summary: str
    description: str
    example: str
    """A worked example: what to type, and what to expect."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    extra: str = "agent"
    """What to install of the package, as in ``ostraca[agent]``, where it needs more than every worker has."""


def count_argument(text: str) -> int:
    """Read a number above zero, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write a whole number above zero")
    return int(text)


def seconds_argument(text: str) -> float:
    """Read a time above zero, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above zero, as in 5 or 0.5")
    return seconds
