"""The options by which a command takes settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.settings.load import Sources

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Let the user give settings, for ``sources_of``, and ask for those in effect (``print_settings``)."""
    parser.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="take settings from this TOML file; environment and flags win over it",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="flags",
        metavar="NAME=VALUE",
        help="set one, as in owner.hold_s=20 (may be repeated)",
    )
    parser.add_argument(
        "--print-settings",
        action="store_true",
        help="print the settings that would be in effect, with what each is for, as a file; do nothing else",
    )


def sources_of(options: argparse.Namespace, also: Sequence[tuple[str, str, str | list[str]]] = ()) -> Sources:
    """Return what was given on the command line, *also* by options of its own, and the environment."""
    return Sources(options.settings, os.environ, tuple(options.flags), tuple(also))
