"""Description of a command: help texts, options and function."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ostraca_fabric.errors import shown

_DIGITS_MAX = 18
"""Maximum digits of a count, so that counts fit 64 bits."""

_SECONDS_MAX = 1e9
"""About 30 years; clocks and timers of the system refuse longer times."""


@dataclass(frozen=True, slots=True)
class Command:
    """Subcommand of ``ostraca``.

    ``add_options`` fills the command's parser; ``run`` does the work and returns the exit code. Both must be
    cheap to import: import dependencies of the work inside ``run``.
    """

    name: str
    summary: str
    description: str
    example: str
    """Worked example: command line and expected output."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]

    extra: str = "agent"
    """Extra of the package to install, as in ``ostraca[agent]``, for commands with needs beyond a worker's.
    """


def count_argument(text: str) -> int:
    """Parse a count above zero, for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no count: write a whole number above zero")
    return int(text)


def seconds_argument(text: str) -> float:
    """Parse a time above zero, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no time: write seconds above zero, as in 5 or 0.5, up to {_SECONDS_MAX:g}"
        )
    return seconds


def run_action(options: argparse.Namespace) -> int:
    """Run the function ``act`` of the chosen action of a command."""
    code: int = options.act(options)
    return code
