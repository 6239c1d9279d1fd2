"""``ostraca fabric rebuild``: what a fabric's directory has lost, made again from its drives.

Superblocks say whose the drives are and how they are laid out, volume records what volumes there are. The
fabric's key is on no drive: without it no block can be found.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.command import Command
from ostraca.places import default_directory, directory_argument

if TYPE_CHECKING:
    from ostraca_fabric.ids import FabricId

_FABRIC_DIGITS = 32


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    rebuild = actions.add_parser(
        "rebuild",
        help="make a lost record again from the drives",
        description=(
            "Make again what the directory of `ostraca up` has lost, from its drives: the fabric's id, its\n"
            "shape and its volumes. Reads superblocks and volume records; writes nothing on a drive. Its\n"
            "key is on no drive: it is used where it is still in the directory, or comes with --key."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    rebuild.add_argument(
        "--dir",
        type=directory_argument,
        default=default_directory(os.environ),
        help="the directory of `ostraca up` (default: %(default)s)",
    )
    key = rebuild.add_mutually_exclusive_group()
    key.add_argument(
        "--key", type=Path, metavar="FILE", help="where the directory has lost fabric.key: a copy of it"
    )
    key.add_argument(
        "--new-key",
        action="store_true",
        help="go on with a new key, where the old one is lost for good: EVERY BLOCK BECOMES A MISS",
    )
    rebuild.add_argument(
        "--fabric",
        type=_fabric_argument,
        metavar="ID",
        help="which fabric, where drives of several lie in the directory",
    )
    rebuild.add_argument(
        "--force",
        action="store_true",
        help="replace the record that is there (it is kept beside the new one)",
    )
    rebuild.add_argument(
        "--dry-run", action="store_true", help="say what was found and what would be done; write nothing"
    )


def _fabric_argument(text: str) -> FabricId:
    from ostraca_fabric.ids import FabricId

    try:
        fabric = bytes.fromhex(text)
    except ValueError:
        fabric = b""
    if len(text) != _FABRIC_DIGITS or not fabric:
        raise argparse.ArgumentTypeError(f"{text!r} is no fabric id: write its {_FABRIC_DIGITS} hex digits")
    return FabricId(fabric)


def _run(options: argparse.Namespace) -> int:
    from ostraca.cli.fabric.rebuild import Keys, look, rebuild
    from ostraca.cli.fabric.report import found_lines, start_line

    keys = Keys(options.key, is_new_allowed=options.new_key)
    if options.dry_run:
        found = look(options.dir, options.fabric)
        print("\n".join(found_lines(found, keys.fate(options.dir))))
        return 1 if found.contradictions else 0
    found = rebuild(options.dir, keys, options.fabric, is_forced=options.force)
    print("\n".join(found_lines(found, keys.fate(options.dir))))
    print(start_line(found))
    return 0


COMMAND = Command(
    name="fabric",
    summary="rebuild a fabric's record from its drives",
    description="Make a fabric's lost record again from what lies on its drives: see ACTION --help.",
    example=(
        "  $ ostraca fabric rebuild --dir /tmp/fabric\n"
        "  fabric 5d2ac11b50c1b1f6f1fdb3a9e0a4d7e2\n"
        "    enclosure-0/drive-0/0    512.0 MiB  2 volumes recorded\n"
        "    ...\n"
        "  Rebuilt. Start it by: ostraca up --dir /tmp/fabric --enclosures 1 --drives 2 --capacity 1024MiB\n"
    ),
    add_options=_add_options,
    run=_run,
)
