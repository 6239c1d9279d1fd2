"""``ostraca fabric``: a fabric that etcd keeps is begun (``create``), what a fabric's directory or etcd has
lost is made again from its drives (``rebuild``), and the admin service is asked what there is in it.

Superblocks say whose the drives are and how they are laid out, volume records what volumes there are. The
fabric's key is on no drive: without it no block can be found.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostraca.cli.admin.fabric import add_views
from ostraca.cli.command import Command, count_argument
from ostraca.cli.etcd_place import add_etcd_options, etcd_options
from ostraca.cli.sizes import size_argument
from ostraca.places import default_directory, directory_argument
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca_fabric.ids import FabricId

_FABRIC_DIGITS = 32


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    create = actions.add_parser(
        "create",
        help="begin a fabric that etcd keeps",
        description=(
            "Begin a fabric in etcd, or find it there, and see to it that it has drives, which are files\n"
            "below DIR. May be repeated, also with more enclosures or drives. The fabric's key and its\n"
            "tokens come to lie in DIR as well. Says what to start next."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    create.set_defaults(act=_create)
    create.add_argument(
        "--files", type=directory_argument, required=True, metavar="DIR", help="where they lie"
    )
    create.add_argument(
        "--enclosures",
        type=_none_or_count,
        default=1,
        metavar="N",
        help="enclosures on files; 0 for none, as others come by `ostraca enclosure add` (default: 1)",
    )
    create.add_argument(
        "--drives", type=count_argument, default=2, metavar="N", help="drives of each enclosure (default: 2)"
    )
    create.add_argument(
        "--capacity",
        type=size_argument,
        default="4GiB",
        metavar="SIZE",
        help="flash of the whole fabric (default: 4GiB)",
    )
    create.add_argument(
        "--segment",
        type=size_argument,
        metavar="SIZE",
        help="what is written in order and evicted whole, of drives that are made now: 1MiB to 256MiB; no "
        "block is larger (default: 64MiB, less for small drives)",
    )
    add_etcd_options(create)
    rebuild = actions.add_parser(
        "rebuild",
        help="make a lost record again from the drives",
        description=(
            "Make again what the directory of `ostraca up` has lost, from its drives: the fabric's id, its\n"
            "shape and its volumes; with --etcd, what etcd has lost. Reads superblocks and volume records;\n"
            "writes nothing on a drive. The key is on no drive: it is used where it is still in the\n"
            "directory, or comes with --key. With --etcd, agents may run or not: blocks are got as soon as\n"
            "one has claimed their shard, and taken owner.grant_s + owner.hold_s + owner.late_write_s\n"
            "(155 s) later, as nobody knows any more where something may still be written.\n"
            "\n"
            "example:\n"
            "  $ ostraca fabric rebuild --etcd 127.0.0.1:2379 --files /var/lib/ostraca --dry-run"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    rebuild.set_defaults(act=_rebuild)
    add_etcd_options(rebuild)
    where = rebuild.add_mutually_exclusive_group()
    where.add_argument(
        "--files", type=directory_argument, metavar="DIR", help="with --etcd: where the drives lie"
    )
    where.add_argument(
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
        help="replace the record that is there (it is kept beside the new one); with --etcd, add what is "
        "missing to what is there, and raise volumes that drives know to have been erased",
    )
    rebuild.add_argument(
        "--dry-run", action="store_true", help="say what was found and what would be done; write nothing"
    )
    add_views(actions)


def _none_or_count(text: str) -> int:
    return 0 if text == "0" else count_argument(text)


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
    code: int = options.act(options)
    return code


def _place(options: argparse.Namespace) -> EtcdPlace:
    """Return where etcd is. Raises UsageError."""
    from ostraca.cli.etcd_place import EtcdPlace

    given: dict[str, Any] = {name: value for _, name, value in etcd_options(options)}
    if not given.get("endpoints"):
        message = "where is etcd? Give --etcd HOST:PORT"
        raise UsageError(message)
    return EtcdPlace(**{**given, "endpoints": tuple(given["endpoints"])})


def _create(options: argparse.Namespace) -> int:
    from ostraca.cli.fabric.create import Shape, create, created_lines

    place = _place(options)
    shape = Shape(options.enclosures, options.drives, options.capacity, options.segment)
    print("\n".join(created_lines(create(place, options.files, shape), place)))
    return 0


def _rebuild_in_etcd(options: argparse.Namespace) -> int:
    from ostraca.cli.fabric.in_etcd import (
        in_etcd_lines,
        look_in_etcd,
        raised_lines,
        rebuild_in_etcd,
        rebuilt_line,
    )
    from ostraca.cli.fabric.rebuild import Keys, look
    from ostraca.cli.fabric.report import found_lines

    keys, directory = Keys(options.key, is_new_allowed=options.new_key), options.files
    if directory is None:
        message = "where are the drives? Give --files DIR"
        raise UsageError(message)
    place, fate = _place(options), keys.fate(directory)
    if options.dry_run:
        found = look(directory.resolve(), options.fabric, is_of_up=False)
        print("\n".join(found_lines(found, fate)))
        if found.contradictions or found.fabric is None:
            return 1
        there = look_in_etcd(place, found.fabric)
        print("\n".join(in_etcd_lines(there, found, place, is_forced=options.force)))
        return 0
    done = rebuild_in_etcd(place, directory, keys, options.fabric, is_forced=options.force)
    print("\n".join([*found_lines(done.found, fate), *raised_lines(done.raised, done.found)]))
    print(rebuilt_line(place))
    return 0


def _rebuild(options: argparse.Namespace) -> int:
    if options.etcd or options.files:
        return _rebuild_in_etcd(options)
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
    summary="begin a fabric, look at it, or rebuild its record",
    description=(
        "Begin a fabric that etcd keeps, make a fabric's lost record again from what lies on its drives, or\n"
        "ask the admin service what there is in it: see ACTION --help."
    ),
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
