"""``ostraca enclosure``: onboard, show, expand, drain and retire enclosures."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, run_action, seconds_argument
from ostraca_cli.commands.admin.errors import OperationError
from ostraca_cli.commands.admin.options import (
    add_action,
    add_etag,
    add_if_match,
    add_watch,
    client_of,
    print_list,
    print_resource,
    write_json,
)
from ostraca_cli.terminal.units import size_argument
from ostraca_fabric.errors import ConnectError, UsageError

_WAIT_S = 120.0
_FORCE_MAP_CHANGE = (
    "proceed even at the limit of placement epochs: lookups then miss blocks of the oldest placement epoch"
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_add(actions)
    add_action(
        actions,
        "list",
        partial(print_list, kind="enclosures"),
        summary="list registered enclosures",
        description="List all registered enclosures, by name.",
    )
    wait = add_action(
        actions,
        "wait",
        _wait,
        summary="wait until enclosures are ready",
        description=(
            "Wait until an enclosure is ready and none is onboarding, as after an installation. After the\n"
            "time limit, one ready enclosure is enough."
        ),
    )
    wait.add_argument(
        "--within",
        type=seconds_argument,
        default=_WAIT_S,
        metavar="S",
        help=f"time limit in seconds (default: {_WAIT_S:g})",
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show an enclosure, its drives and its last operation",
        description="Show the controllers, the drives and the last operation of an enclosure.",
    )
    _add_name(show)
    add_etag(show)
    drain = add_action(
        actions,
        "drain",
        partial(_change_state, verb="drain"),
        summary="stop new writes to an enclosure, until no lookup needs the enclosure",
        description=(
            "Stop new writes to an enclosure. The drain ends when no lookup needs the enclosure, at the\n"
            "latest when the other enclosures have been written over once; until then blocks stay readable."
        ),
    )
    _add_name(drain)
    _add_change(drain, force=_FORCE_MAP_CHANGE)
    undrain = add_action(
        actions,
        "undrain",
        partial(_change_state, verb="undrain"),
        summary="allow new writes to a drained enclosure",
        description="Allow new writes to a drained or draining enclosure.",
    )
    _add_name(undrain)
    _add_change(undrain, force=_FORCE_MAP_CHANGE)
    _add_expand(actions)
    _add_replace(actions)
    retire = add_action(
        actions,
        "retire",
        partial(_change_state, verb="retire"),
        summary="remove an enclosure from the fabric",
        description="Remove a drained or never onboarded enclosure from the fabric, with its registration.",
    )
    _add_name(retire)
    _add_change(retire, force="retire without a drain: ALL BLOCKS OF THE ENCLOSURE ARE LOST")


def _add_add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = add_action(
        actions,
        "add",
        _add,
        summary="register an enclosure and onboard it",
        description=(
            "Register and onboard an enclosure. Every agent must reach the enclosure and see the same\n"
            "drives; the drives are checked, formatted, measured and added to the map. A repetition changes\n"
            "nothing, or restarts a failed onboarding. Other controllers or another secret replace those of\n"
            "an enclosure in use."
        ),
    )
    _add_name(add)
    add.add_argument(
        "--nqn", metavar="NQN", help="NQN of the subsystem (default: nqn.2025-01.io.ostraca:NAME)"
    )
    add.add_argument(
        "--controller",
        action="append",
        required=True,
        dest="controllers",
        metavar="PATH",
        help="rdma://host:4420, tcp://host:4420 or files:///dir; repeat for further paths, preferred first",
    )
    add.add_argument(
        "--secret",
        default="",
        metavar="NAME",
        help="name of the secret for authentication at the enclosure (default: none)",
    )
    add.add_argument(
        "--failure-domain",
        default="",
        metavar="NAME",
        help="group of enclosures with a common cause of failure (default: a domain of its own)",
    )
    _add_drives(add, default="all visible drives")
    add.add_argument(
        "--segment",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="segment size, the unit of eviction (default: derived from the drive size)",
    )
    add_if_match(add, "enclosure")
    add_watch(add)


def _add_expand(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    expand = add_action(
        actions,
        "expand",
        _expand,
        summary="add drives to an enclosure in use",
        description=(
            "Add drives to an enclosure in use. The drives are checked, formatted, measured and added to\n"
            "the map in one change. Existing drives stay unchanged."
        ),
    )
    _add_name(expand)
    _add_drives(expand, default="all visible unused drives")
    _add_change(expand, force=_FORCE_MAP_CHANGE)


def _add_replace(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replace = add_action(
        actions,
        "replace",
        _replace,
        summary="replace a drive by another",
        description=(
            "Replace a drive by another drive of the enclosure: the new drive is formatted, measured, and\n"
            "put into the map instead of the old drive. ALL BLOCKS ON THE OLD DRIVE ARE LOST."
        ),
    )
    _add_name(replace)
    replace.add_argument("drive", metavar="DRIVE", help="name of the old drive, as in drive-3")
    replace.add_argument(
        "--with",
        dest="replacement",
        default="",
        metavar="NGUID",
        help="the new drive (default: the only unused drive)",
    )
    replace.add_argument(
        "--wipe",
        action="store_true",
        help="format the new drive even with contents: ALL CONTENTS ARE LOST. Needs --with",
    )
    _add_change(replace, force=_FORCE_MAP_CHANGE)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the enclosure")


def _add_drives(parser: argparse.ArgumentParser, *, default: str) -> None:
    parser.add_argument(
        "--drive",
        action="append",
        default=[],
        dest="drives",
        metavar="NGUID",
        help=f"use this drive (may be repeated; default: {default})",
    )
    parser.add_argument(
        "--wipe",
        action="append",
        default=[],
        metavar="NGUID",
        help="format this drive even with contents: ALL CONTENTS ARE LOST (may be repeated)",
    )


def _add_change(parser: argparse.ArgumentParser, *, force: str) -> None:
    parser.add_argument("--force", action="store_true", help=force)
    add_if_match(parser, "enclosure")
    add_watch(parser)


def _add(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.admin.responses import EnclosureInfo, read
    from ostraca_cli.commands.admin.watching import watch_or_hint
    from ostraca_fabric.model.target import NQN_PREFIX

    client = client_of(options)
    body = {
        "nqn": options.nqn or f"{NQN_PREFIX}{options.name}",
        "controllers": options.controllers,
        "secret": options.secret,
        "failure_domain": options.failure_domain,
        "drives": options.drives,
        "wipe": options.wipe,
        "segment_bytes": options.segment,
    }
    response = client.ask("PUT", _path(options), body, if_match=options.if_match)
    enclosure = read(response.body, EnclosureInfo)
    last = enclosure.status.operation
    is_unchanged = last.kind != "onboard" or last.has_ended
    if options.json and (is_unchanged or not options.watch):
        write_json(response.body)
        return 0
    if is_unchanged:
        print(f"enclosure {enclosure.name} is {enclosure.status.phase}, with this registration: no change")
        return 0
    return watch_or_hint(client, last, is_json=options.json, is_watched=options.watch)


def _change_state(options: argparse.Namespace, verb: str) -> int:
    return _change(options, f"{_path(options)}:{verb}", {"force": options.force})


def _expand(options: argparse.Namespace) -> int:
    body = {"drives": options.drives, "wipe": options.wipe, "force": options.force}
    return _change(options, f"{_path(options)}:expand", body)


def _replace(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.admin.client import quoted

    if options.wipe and not options.replacement:
        message = "--wipe needs the drive to wipe: add --with NGUID"
        raise UsageError(message)
    return _change(
        options,
        f"{_path(options)}/drives/{quoted(options.drive)}:replace",
        {"replacement": options.replacement, "wipe": options.wipe, "force": options.force},
    )


def _change(options: argparse.Namespace, path: str, body: dict[str, object]) -> int:
    """Request a long operation, and follow the operation if asked."""
    from ostraca_cli.commands.admin.watching import report_start

    client = client_of(options)
    response = client.ask("POST", path, body, if_match=options.if_match)
    return report_start(client, response.body, is_json=options.json, is_watched=options.watch)


def _wait(options: argparse.Namespace) -> int:
    import time

    from ostraca_cli.commands.admin.responses import EnclosureInfo, items
    from ostraca_cli.commands.admin.watching import POLL_S

    client, until_s = client_of(options), time.monotonic() + options.within
    while True:
        is_late, trouble = time.monotonic() >= until_s, "none is registered"
        try:
            enclosures = items(client.pages("/v1/enclosures"), EnclosureInfo)
        except ConnectError as error:
            enclosures, trouble = [], str(error)
        phases = {each.status.phase for each in enclosures}
        text = ", ".join(f"{each.name} is {each.status.phase}" for each in enclosures) or trouble
        if "ready" in phases and (is_late or "onboarding" not in phases):
            print(text)
            return 0
        if is_late:
            raise OperationError(f"no enclosure is ready after {options.within:g} s: {text}")
        time.sleep(POLL_S)


def _show(options: argparse.Namespace) -> int:
    return print_resource(options, "enclosure", client_of(options).get(_path(options)))


def _path(options: argparse.Namespace) -> str:
    from ostraca_cli.commands.admin.client import quoted

    return f"/v1/enclosures/{quoted(options.name)}"


COMMAND = Command(
    name="enclosure",
    summary="onboard, expand, drain and retire enclosures",
    description=(
        "Manage the enclosures of a fabric through the admin service (`ostraca serve admin`): see\n"
        "ACTION --help. Operations continue without the command; --watch follows an operation, with exit\n"
        "code 0 after success and 1 after failure. Exit code 3: the present state forbids the request, and\n"
        "nothing was changed."
    ),
    example=(
        "  $ ostraca enclosure add shelf-1 --controller rdma://10.0.8.1:4420 --watch\n"
        "  onboard of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "    reachable: 8 of 8 agents reach the enclosure\n"
        "    ...\n"
        "  done: 24 drives in the map\n"
    ),
    add_options=_add_options,
    run=run_action,
    extra="admin",
)
