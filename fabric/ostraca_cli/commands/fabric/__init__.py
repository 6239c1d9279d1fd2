"""``ostraca fabric``: create, rebuild and inspect a fabric.

``create`` begins a fabric in etcd. ``rebuild`` restores the contents of a fabric's directory or of etcd from
the drives. The other actions query the admin service.

Superblocks name the fabric and the layout of each drive; volume records name the volumes. No drive holds the
fabric's key, and no block can be found without the key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from ostraca_cli.command import (
    DRIVES,
    Command,
    action,
    directory_option,
    number_argument,
    one_action,
    one_of,
    option,
    run_action,
    seconds_argument,
)
from ostraca_cli.commands.admin.fabric import VIEWS
from ostraca_cli.composition.etcd_options import ETCD_OPTIONS, EtcdPlace, etcd_options
from ostraca_cli.composition.process_limits import check_client_of_etcd
from ostraca_cli.terminal.units import size_argument
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.sockets.default_paths import default_directory, directory_argument

_FABRIC_DIGITS = 32


def _fabric_argument(text: str) -> FabricId:
    from ostraca_fabric.model.ids import FabricId

    try:
        fabric = bytes.fromhex(text)
    except ValueError:
        fabric = b""
    if len(text) != _FABRIC_DIGITS or not fabric:
        raise argparse.ArgumentTypeError(f"{text!r} is no fabric id: write {_FABRIC_DIGITS} hex digits")
    return FabricId(fabric)


def _place(options: argparse.Namespace) -> EtcdPlace:
    """Return the location of etcd.

    Raises UsageError, and ResourceError if an etcd client cannot run here.
    """
    from ostraca_cli.composition.etcd_options import EtcdPlace

    given: dict[str, Any] = {name: value for _, name, value in etcd_options(options)}
    if not given.get("endpoints"):
        raise UsageError("the address of etcd is missing: give --etcd HOST:PORT")
    check_client_of_etcd("the etcd client")
    return EtcdPlace(**{**given, "endpoints": tuple(given["endpoints"])})


def _create(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.fabric.create import Shape, create, create_with_key, created_lines
    from ostraca_fabric.model.ids import DriveId

    place = _place(options)
    if options.fabric_key is not None:
        if options.tokens is None:
            raise UsageError("--fabric-key needs the file of tokens: give --tokens FILE")
        created = create_with_key(place, options.fabric_key, options.tokens, wait_s=options.wait)
        print("\n".join(created_lines(created, place)))
        return 0
    replaced = frozenset(map(DriveId, options.replace))
    shape = Shape(options.enclosures, options.drives, options.capacity, options.segment, replaced)
    print("\n".join(created_lines(create(place, options.files, shape), place)))
    return 0


def _rebuild_in_etcd(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.fabric.in_etcd import (
        in_etcd_lines,
        look_in_etcd,
        raised_lines,
        rebuild_in_etcd,
        rebuilt_line,
    )
    from ostraca_cli.commands.fabric.rebuild import KeyOptions, found_lines, look

    keys, directory = KeyOptions(options.key, is_new_allowed=options.new_key), options.files
    if directory is None:
        raise UsageError("the directory of the drives is missing: give --files DIR")
    place, source = _place(options), keys.source(directory)
    if options.dry_run:
        found = look(directory.resolve(), options.fabric, is_of_up=False)
        print("\n".join(found_lines(found, source)))
        if found.contradictions or found.fabric is None:
            return 1
        contents = asyncio.run(look_in_etcd(place, found.fabric))
        print("\n".join(in_etcd_lines(contents, found, place, is_forced=options.force)))
        return 0
    done = rebuild_in_etcd(place, directory, keys, options.fabric, is_forced=options.force)
    print("\n".join([*found_lines(done.found, source), *raised_lines(done.raised, done.found)]))
    print(rebuilt_line(place))
    return 0


def _rebuild(options: argparse.Namespace) -> int:
    if options.etcd or options.files:
        return _rebuild_in_etcd(options)
    from ostraca_cli.commands.fabric.rebuild import KeyOptions, found_lines, look, rebuild, start_line

    keys = KeyOptions(options.key, is_new_allowed=options.new_key)
    directory = options.dir or default_directory(os.environ)
    if options.dry_run:
        found = look(directory, options.fabric)
        print("\n".join(found_lines(found, keys.source(directory))))
        return 1 if found.contradictions else 0
    found = rebuild(directory, keys, options.fabric, is_forced=options.force)
    print("\n".join(found_lines(found, keys.source(directory))))
    print(start_line(found))
    return 0


_ACTIONS = one_action(
    action(
        "create",
        _create,
        one_of(
            option("--files", type=directory_argument, metavar="DIR", help="directory of the drives"),
            option(
                "--fabric-key",
                type=Path,
                metavar="FILE",
                help="use this key of 32 random bytes, and no drives",
            ),
            required=True,
        ),
        option("--tokens", type=Path, metavar="FILE", help="with --fabric-key: check this file of tokens"),
        option(
            "--wait",
            type=seconds_argument,
            default=0.0,
            metavar="SECONDS",
            help="with --fabric-key: wait this long for etcd (default: 0)",
        ),
        option(
            "--enclosures",
            type=number_argument,
            default=1,
            metavar="N",
            help="enclosures on files; 0 for none, for use of `ostraca enclosure add` (default: 1)",
        ),
        DRIVES,
        option(
            "--capacity",
            type=size_argument,
            default="4GiB",
            metavar="SIZE",
            help="flash of the whole fabric (default: 4GiB)",
        ),
        option(
            "--segment",
            type=size_argument,
            metavar="SIZE",
            help="segment size of new drives, the unit of eviction and the limit of block sizes: 1MiB to "
            "256MiB (default: 64MiB, less for small drives)",
        ),
        option(
            "--replace",
            action="append",
            default=[],
            metavar="DRIVE",
            help="replace this drive by an empty drive after loss of its file, as in enclosure-0/drive-1 "
            "(may be repeated)",
        ),
        *ETCD_OPTIONS,
        summary="create a fabric in etcd",
        description=(
            "Create a fabric in etcd, with files below DIR as drives. May be repeated, also with more\n"
            "enclosures or drives. DIR also receives the key and the tokens of the fabric. Prints the next\n"
            "command.\n"
            "\n"
            "With --fabric-key and --tokens, the command creates no files: the fabric has the given key,\n"
            "and enclosures are added by `ostraca enclosure add`."
        ),
    ),
    action(
        "rebuild",
        _rebuild,
        *ETCD_OPTIONS,
        one_of(
            option(
                "--files", type=directory_argument, metavar="DIR", help="with --etcd: directory of the drives"
            ),
            directory_option("directory of `ostraca up`"),
        ),
        one_of(
            option(
                "--key",
                type=Path,
                metavar="FILE",
                help="copy of fabric.key, if the directory has lost the key",
            ),
            option(
                "--new-key",
                action="store_true",
                help="create a new key after loss of the old key: EVERY BLOCK BECOMES A MISS",
            ),
        ),
        option(
            "--fabric",
            type=_fabric_argument,
            metavar="ID",
            help="id of the fabric, if the directory has drives of several fabrics",
        ),
        option(
            "--force",
            action="store_true",
            help="replace an existing record, with a backup beside the new record; with --etcd, add missing "
            "records, and raise the incarnation of volumes erased according to the drives",
        ),
        option("--dry-run", action="store_true", help="print findings and planned changes; write nothing"),
        summary="rebuild a lost fabric record from the drives",
        description=(
            "Rebuild the fabric record in a directory of `ostraca up` from its drives: id, shape and\n"
            "volumes. With --etcd, rebuild the records in etcd. Reads superblocks and volume records; never\n"
            "writes to a drive. No drive has the key: keep the key in the directory, or give --key. With\n"
            "--etcd, agents may be running. Gets work once a shard is claimed. Puts work owner.grant_s +\n"
            "owner.hold_s + owner.late_write_s (155 s) later, after the last possible write under a lost\n"
            "grant.\n"
            "\n"
            "example:\n"
            "  $ ostraca fabric rebuild --etcd 127.0.0.1:2379 --files /var/lib/ostraca --dry-run"
        ),
    ),
    *VIEWS,
)

COMMAND = Command(
    name="fabric",
    summary="create, inspect or rebuild a fabric",
    description=(
        "Create a fabric in etcd, rebuild a lost fabric record from the drives, or inspect a fabric through\n"
        "the admin service: see ACTION --help."
    ),
    example=(
        "  $ ostraca fabric rebuild --dir /tmp/fabric\n"
        "  fabric 5d2ac11b50c1b1f6f1fdb3a9e0a4d7e2\n"
        "    enclosure-0/drive-0/0    512.0 MiB  2 volumes recorded\n"
        "    ...\n"
        "  Rebuilt. Start the fabric by: ostraca up --dir /tmp/fabric --enclosures 1 --drives 2 --capacity "
        "1024MiB\n"
    ),
    options=(_ACTIONS,),
    run=run_action,
)
