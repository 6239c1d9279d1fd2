"""``ostraca enclosure``: onboard, show, expand, drain and retire enclosures."""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import Command, one_action, option, run_action, seconds_argument
from ostraca_cli.commands.admin.errors import OperationError
from ostraca_cli.commands.admin.options import (
    ETAG,
    WATCH,
    ask,
    change,
    client_of,
    if_match,
    name_argument,
    nguid_argument,
    optional,
    print_done,
    print_list,
    report_start,
    segment_argument,
    service_action,
    show,
)
from ostraca_fabric.errors import ConnectError

_PATH = "/v1/enclosures/{name}"
_WAIT_S = 120.0

_NAME = option("name", type=name_argument("enclosure"), metavar="NAME", help="the enclosure")
_IF_MATCH = if_match("enclosure")
_FORCE = option(
    "--force",
    action="store_true",
    help="proceed even at the limit of placement epochs: lookups then miss blocks of the oldest placement "
    "epoch",
)
_DRIVES = {
    "action": "append",
    "default": [],
    "dest": "drives",
    "type": nguid_argument,
    "metavar": "NGUID",
}
_WIPE = option(
    "--wipe",
    action="append",
    default=[],
    type=nguid_argument,
    metavar="NGUID",
    help="format this drive even with contents: ALL CONTENTS ARE LOST (may be repeated)",
)


def _add(options: argparse.Namespace) -> int:
    from ostraca_admin.api.views import EnclosureView
    from ostraca_cli.commands.admin.responses import read

    fields = ("nqn", "controllers", "secret", "failure_domain", "drives", "wipe", "segment_bytes")
    response = ask(options, "PUT", _PATH, *fields)
    enclosure = read(response.body, EnclosureView)
    last = enclosure.status.operation
    if last.kind == "onboard" and not last.has_ended:
        return report_start(options, last, response)
    line = f"enclosure {enclosure.name} is {enclosure.status.phase}, with this registration: no change"
    return print_done(options, response, line)


def _wait(options: argparse.Namespace) -> int:
    import time

    from ostraca_admin.api.views import EnclosureView
    from ostraca_cli.commands.admin.responses import items
    from ostraca_cli.commands.admin.watching import POLL_S

    client, until_s = client_of(options), time.monotonic() + options.within
    while True:
        is_late, trouble = time.monotonic() >= until_s, "none is registered"
        try:
            enclosures = items(client.pages("/v1/enclosures"), EnclosureView)
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


_ACTIONS = one_action(
    service_action(
        "add",
        _add,
        _NAME,
        option(
            "--nqn",
            default="",
            metavar="NQN",
            help="NQN of the subsystem (default: nqn.2025-01.io.ostraca:NAME)",
        ),
        option(
            "--controller",
            action="append",
            required=True,
            dest="controllers",
            metavar="PATH",
            help="rdma://host:4420, tcp://host:4420 or files:///dir; repeat for further paths, preferred "
            "first",
        ),
        option(
            "--secret",
            type=optional(name_argument("secret")),
            default="",
            metavar="NAME",
            help="name of the secret for authentication at the enclosure (default: none)",
        ),
        option(
            "--failure-domain",
            type=optional(name_argument("failure domain")),
            default="",
            metavar="NAME",
            help="group of enclosures with a common cause of failure (default: a domain of its own)",
        ),
        option("--drive", help="use this drive (may be repeated; default: all visible drives)", **_DRIVES),
        _WIPE,
        option(
            "--segment",
            type=segment_argument,
            default=0,
            dest="segment_bytes",
            metavar="SIZE",
            help="segment size, the unit of eviction (default: derived from the drive size)",
        ),
        _IF_MATCH,
        WATCH,
        summary="register an enclosure and onboard it",
        description=(
            "Register and onboard an enclosure. Every agent must reach the enclosure and see the same\n"
            "drives; the drives are checked, formatted, measured and added to the map. A repetition changes\n"
            "nothing, or restarts a failed onboarding. Other controllers or another secret replace those of\n"
            "an enclosure in use."
        ),
    ),
    service_action(
        "list",
        partial(print_list, kind="enclosures"),
        summary="list registered enclosures",
        description="List all registered enclosures, by name.",
    ),
    service_action(
        "wait",
        _wait,
        option(
            "--within",
            type=seconds_argument,
            default=_WAIT_S,
            metavar="S",
            help=f"time limit in seconds (default: {_WAIT_S:g})",
        ),
        summary="wait until enclosures are ready",
        description=(
            "Wait until an enclosure is ready and none is onboarding, as after an installation. After the\n"
            "time limit, one ready enclosure is enough."
        ),
    ),
    service_action(
        "show",
        partial(show, kind="enclosure", path=_PATH),
        _NAME,
        ETAG,
        summary="show an enclosure, its drives and its last operation",
        description="Show the controllers, the drives and the last operation of an enclosure.",
    ),
    service_action(
        "drain",
        partial(change, path=f"{_PATH}:drain", fields=("force",)),
        *(_NAME, _FORCE, _IF_MATCH, WATCH),
        summary="stop new writes to an enclosure, until no lookup needs the enclosure",
        description=(
            "Stop new writes to an enclosure. The drain ends when no lookup needs the enclosure, at the\n"
            "latest when the other enclosures have been written over once; until then blocks stay readable."
        ),
    ),
    service_action(
        "undrain",
        partial(change, path=f"{_PATH}:undrain", fields=("force",)),
        *(_NAME, _FORCE, _IF_MATCH, WATCH),
        summary="allow new writes to a drained enclosure",
        description="Allow new writes to a drained or draining enclosure.",
    ),
    service_action(
        "expand",
        partial(change, path=f"{_PATH}:expand", fields=("drives", "wipe", "force")),
        _NAME,
        option(
            "--drive", help="use this drive (may be repeated; default: all visible unused drives)", **_DRIVES
        ),
        *(_WIPE, _FORCE, _IF_MATCH, WATCH),
        summary="add drives to an enclosure in use",
        description=(
            "Add drives to an enclosure in use. The drives are checked, formatted, measured and added to\n"
            "the map in one change. Existing drives stay unchanged."
        ),
    ),
    service_action(
        "replace",
        partial(change, path=_PATH + "/drives/{drive}:replace", fields=("replacement", "wipe", "force")),
        _NAME,
        option(
            "drive", type=name_argument("drive"), metavar="DRIVE", help="name of the old drive, as in drive-3"
        ),
        option(
            "--with",
            dest="replacement",
            type=optional(nguid_argument),
            default="",
            metavar="NGUID",
            help="the new drive (default: the only unused drive)",
        ),
        option(
            "--wipe",
            action="store_true",
            help="format the new drive even with contents: ALL CONTENTS ARE LOST. Needs --with",
        ),
        *(_FORCE, _IF_MATCH, WATCH),
        summary="replace a drive by another",
        description=(
            "Replace a drive by another drive of the enclosure: the new drive is formatted, measured, and\n"
            "put into the map instead of the old drive. ALL BLOCKS ON THE OLD DRIVE ARE LOST."
        ),
    ),
    service_action(
        "retire",
        partial(change, path=f"{_PATH}:retire", fields=("force",)),
        _NAME,
        option(
            "--force",
            action="store_true",
            help="retire without a drain: ALL BLOCKS OF THE ENCLOSURE ARE LOST",
        ),
        *(_IF_MATCH, WATCH),
        summary="remove an enclosure from the fabric",
        description="Remove a drained or never onboarded enclosure from the fabric, with its registration.",
    ),
)

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
    options=(_ACTIONS,),
    run=run_action,
    extra="admin",
)
