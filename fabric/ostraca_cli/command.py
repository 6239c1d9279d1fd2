"""Description of a command: help texts, options and function."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostraca_fabric.errors import shown
from ostraca_fabric.sockets.default_paths import default_directory_words, directory_argument

_DIGITS_MAX = 18
"""Maximum digits of a count, so that counts fit 64 bits."""

_SECONDS_MAX = 1e9
"""About 30 years; clocks and timers of the system refuse longer times."""

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(rf"(\S+?)\s?({'|'.join(_UNITS_S)})")


AddOption = Callable[[Any], object]
"""Function to add an option, or several, to a parser or a part of a parser."""


@dataclass(frozen=True, slots=True)
class Command:
    """Subcommand of ``ostraca``.

    ``options`` fill the command's parser; ``run`` does the work and returns the exit code. Both must be
    cheap to import: import dependencies of the work inside ``run``.
    """

    name: str
    summary: str
    description: str
    example: str
    """Worked example: command line and expected output."""

    options: tuple[AddOption, ...]
    run: Callable[[argparse.Namespace], int]

    extra: str = "agent"
    """Extra of the package to install, as in ``ostraca[agent]``, for commands with needs beyond a worker's.
    """


def option(*names: str, **settings: Any) -> AddOption:  # noqa: ANN401 (as argparse's own)
    """Describe an option, as for ``ArgumentParser.add_argument``."""
    return lambda parser: parser.add_argument(*names, **settings)


def one_of(*options: AddOption, required: bool = False) -> AddOption:
    """Describe options that exclude each other."""
    return lambda parser: add_options(parser.add_mutually_exclusive_group(required=required), *options)


def group(title: str, *options: AddOption) -> AddOption:
    """Describe options with a common heading in the help text."""
    return lambda parser: add_options(parser.add_argument_group(title), *options)


def action(
    name: str,
    act: Callable[[argparse.Namespace], int],
    *options: AddOption,
    summary: str,
    description: str,
    epilog: str = "",
) -> AddOption:
    """Describe an action of a command, with its own options; ``run_action`` calls *act*."""

    def add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        parser = actions.add_parser(
            name,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(act=act)
        add_options(parser, *options)

    return add


def one_action(*actions: AddOption, metavar: str = "ACTION") -> AddOption:
    """Describe the actions of a command; each call names one."""
    return lambda parser: add_options(parser.add_subparsers(metavar=metavar, required=True), *actions)


def add_options(parser: Any, *options: AddOption) -> None:  # noqa: ANN401 (a parser or a part of it)
    """Add the options to a parser or to a part of it, in order."""
    for add in options:
        add(parser)


def directory_option(meaning: str) -> AddOption:
    """Describe the option for the directory of a fabric; the default depends on the environment."""
    return lambda parser: parser.add_argument(
        "--dir",
        type=directory_argument,
        help=f"{meaning} (default: {default_directory_words(os.environ)})".replace("%", "%%"),
    )


def count_argument(text: str) -> int:
    """Parse a count above zero, for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no count: write a whole number above zero")
    return int(text)


def seconds_argument(text: str) -> float:
    """Parse a time above zero, in seconds or with a unit, for argparse; return seconds."""
    found = _TIME.fullmatch(text)
    try:
        seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no time: write seconds, or a number with ms, s, min, h or d, as in 0.5 or 6h, "
            f"above zero and up to {_SECONDS_MAX:g} s"
        )
    return seconds


def number_argument(text: str) -> int:
    """Parse a number from 0, for argparse."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number: count from 0")
    return int(text)


def run_action(options: argparse.Namespace) -> int:
    """Run the function ``act`` of the chosen action of a command."""
    code: int = options.act(options)
    return code


JSON = option("--json", action="store_true", help="print everything as JSON")
DRIVES = option(
    "--drives", type=count_argument, default=2, metavar="N", help="drives of each enclosure (default: 2)"
)
