"""``ostraca enclosure``: enclosures of a fabric, brought in, looked at, expanded, drained and retired."""

from __future__ import annotations

import argparse

from ostraca.cli.admin.options import add_action, add_if_match, add_watch, client_of, write_json, write_pages
from ostraca.cli.command import Command
from ostraca.cli.sizes import size_argument


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_add(actions)
    _add_reading(actions)
    drain = add_action(
        actions,
        "drain",
        _drain,
        summary="let one take no new blocks, until nothing of it is looked up",
        description=(
            "Let an enclosure take no new blocks. It is drained when nothing of it is looked up any more,\n"
            "which may take until the others have been written over once; its blocks can be got until then."
        ),
    )
    _add_change(
        drain, force="also where as many placements as may be are asked: look-ups miss what the oldest placed"
    )
    undrain = add_action(
        actions,
        "undrain",
        _undrain,
        summary="let one take blocks again",
        description="Let an enclosure take blocks again that is drained, or being drained.",
    )
    _add_change(undrain, force="also where as many placements as may be are asked")
    _add_expand(actions)
    replace = add_action(
        actions,
        "replace",
        _replace,
        summary="use another drive in one's place",
        description=(
            "Use another drive of the enclosure in one's place: first it is formatted and measured, then it\n"
            "takes the other's place in the map. WHAT THE OLD DRIVE HOLDS IS LOST."
        ),
    )
    replace.add_argument("name", metavar="NAME", help="the enclosure")
    replace.add_argument("drive", metavar="DRIVE", help="its name within the enclosure, as in drive-3")
    replace.add_argument(
        "--with",
        dest="replacement",
        default="",
        metavar="NGUID",
        help="the drive that comes for it (default: the only one there that is not used)",
    )
    replace.add_argument(
        "--wipe",
        action="store_true",
        help="the drive that comes may hold something: THAT IS LOST. Takes --with",
    )
    _add_change(replace, force="also where as many placements as may be are asked", is_named=True)
    retire = add_action(
        actions,
        "retire",
        _retire,
        summary="take one out of the fabric",
        description="Take a drained enclosure, or one that never came in, out of the fabric and forget it.",
    )
    _add_change(retire, force="also one that is not drained: ITS BLOCKS ARE LOST")


def _add_add(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = add_action(
        actions,
        "add",
        _add,
        summary="register one, and bring it into the fabric",
        description=(
            "Register an enclosure. It is then onboarded: every agent has to reach it and see the same\n"
            "drives; they are checked, formatted, measured, and put into the map. The same again changes\n"
            "nothing, and begins anew where that has failed; other controllers or another secret say how it\n"
            "is reached now."
        ),
    )
    add.add_argument("name", metavar="NAME", help="what it is called in the fabric")
    add.add_argument(
        "--nqn", metavar="NQN", help="its subsystem's name (default: nqn.2025-01.io.ostraca:NAME)"
    )
    add.add_argument(
        "--controller",
        action="append",
        required=True,
        dest="controllers",
        metavar="PATH",
        help="rdma://host:4420, tcp://host:4420 or files:///dir; again for each further path, "
        "those to prefer first",
    )
    add.add_argument(
        "--secret",
        default="",
        metavar="NAME",
        help="the name of the secret that agents show it (default: none)",
    )
    add.add_argument(
        "--failure-domain",
        default="",
        metavar="NAME",
        help="what fails at once with others (default: its own)",
    )
    add.add_argument(
        "--drive",
        action="append",
        default=[],
        dest="drives",
        metavar="NGUID",
        help="use this drive (may be repeated; default: all that it shows)",
    )
    add.add_argument(
        "--wipe",
        action="append",
        default=[],
        metavar="NGUID",
        help="this drive may be formatted though it holds something: THAT IS LOST (may be repeated)",
    )
    add.add_argument(
        "--segment",
        type=size_argument,
        default=0,
        metavar="SIZE",
        help="what is written in order and evicted whole (default: as follows from a drive's size)",
    )
    add_if_match(add, "enclosure")
    add_watch(add)


def _add_expand(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    expand = add_action(
        actions,
        "expand",
        _expand,
        summary="add drives to one in use",
        description=(
            "Add drives to an enclosure that is in use: they are checked, formatted, measured, and put into\n"
            "the map at once. Its other drives stay as they are."
        ),
    )
    expand.add_argument("name", metavar="NAME", help="the enclosure")
    expand.add_argument(
        "--drive",
        action="append",
        default=[],
        dest="drives",
        metavar="NGUID",
        help="add this drive (may be repeated; default: all that it shows and does not use)",
    )
    expand.add_argument(
        "--wipe",
        action="append",
        default=[],
        metavar="NGUID",
        help="this one of them may hold something: THAT IS LOST (may be repeated)",
    )
    _add_change(expand, force="also where as many placements as may be are asked", is_named=True)


def _add_reading(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_action(
        actions,
        "list",
        _list,
        summary="list all that are registered",
        description="List all enclosures that are registered, by name.",
    )
    show = add_action(
        actions,
        "show",
        _show,
        summary="show one: its drives, and the last work on it",
        description="Show one enclosure: how it is reached, its drives, and the last work on it.",
    )
    show.add_argument("name", metavar="NAME", help="the enclosure")
    show.add_argument(
        "--etag", action="store_true", help="print its ETag alone, which --if-match of other actions takes"
    )


def _add_change(parser: argparse.ArgumentParser, *, force: str, is_named: bool = False) -> None:
    if not is_named:
        parser.add_argument("name", metavar="NAME", help="the enclosure")
    parser.add_argument("--force", action="store_true", help=force)
    add_if_match(parser, "enclosure")
    add_watch(parser)


def _add(options: argparse.Namespace) -> int:
    from ostraca.cli.admin.answers import Enclosure, read
    from ostraca.cli.admin.watching import followed
    from ostraca_fabric.target import NQN_PREFIX

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
    answer = client.ask("PUT", _path(options.name), body, if_match=options.if_match)
    known = read(answer.body, Enclosure)
    last = known.status.operation
    if last.kind != "onboard" or last.has_ended:
        if options.json:
            write_json(answer.body)
        else:
            print(f"{known.name} is registered so already, and is {known.status.phase}: nothing changes")
        return 0
    if not options.watch and options.json:
        write_json(answer.body)
        return 0
    return followed(client, last, is_json=options.json, is_watched=options.watch)


def _drain(options: argparse.Namespace) -> int:
    return _change(options, f"{_path(options.name)}:drain", {"force": options.force})


def _undrain(options: argparse.Namespace) -> int:
    return _change(options, f"{_path(options.name)}:undrain", {"force": options.force})


def _retire(options: argparse.Namespace) -> int:
    return _change(options, f"{_path(options.name)}:retire", {"force": options.force})


def _expand(options: argparse.Namespace) -> int:
    body = {"drives": options.drives, "wipe": options.wipe, "force": options.force}
    return _change(options, f"{_path(options.name)}:expand", body)


def _replace(options: argparse.Namespace) -> int:
    from ostraca.cli.admin.client import quoted
    from ostraca_fabric.errors import UsageError

    if options.wipe and not options.replacement:
        message = "which drive may be wiped? Name it: --with NGUID --wipe"
        raise UsageError(message)
    return _change(
        options,
        f"{_path(options.name)}/drives/{quoted(options.drive)}:replace",
        {"replacement": options.replacement, "wipe": options.wipe, "force": options.force},
    )


def _change(options: argparse.Namespace, path: str, body: dict[str, object]) -> int:
    """Ask for long work, and follow it where that is wanted."""
    from ostraca.cli.admin.watching import begun

    client = client_of(options)
    answer = client.ask("POST", path, body, if_match=options.if_match)
    return begun(client, answer.body, is_json=options.json, is_watched=options.watch)


def _list(options: argparse.Namespace) -> int:
    pages = client_of(options).pages("/v1/enclosures")
    if options.json:
        write_pages(pages)
        return 0
    from ostraca.cli.admin.answers import Enclosure, items
    from ostraca.cli.admin.view import enclosures_view, show

    show(enclosures_view(items(pages, Enclosure)))
    return 0


def _show(options: argparse.Namespace) -> int:
    answer = client_of(options).get(_path(options.name))
    if options.etag:
        print(answer.etag)
        return 0
    if options.json:
        write_json(answer.body)
        return 0
    from ostraca.cli.admin.answers import Enclosure, read
    from ostraca.cli.admin.view import enclosure_view, show

    show(enclosure_view(read(answer.body, Enclosure), answer.etag))
    return 0


def _path(name: str) -> str:
    from ostraca.cli.admin.client import quoted

    return f"/v1/enclosures/{quoted(name)}"


def _run(options: argparse.Namespace) -> int:
    code: int = options.act(options)
    return code


COMMAND = Command(
    name="enclosure",
    summary="bring enclosures in, expand, drain and retire them",
    description=(
        "Ask the admin service (`ostraca serve admin`) about the enclosures of a fabric: see ACTION --help.\n"
        "Long work goes on by itself; --watch follows it, and ends with 0 when it is done, 1 when it has\n"
        "failed. Ends with 3 where things are not so that it could be done now: nothing was changed."
    ),
    example=(
        "  $ ostraca enclosure add shelf-1 --controller rdma://10.0.8.1:4420 --watch\n"
        "  onboard of shelf-1 (operation 019a3b7c5d10-5f0e21aa)\n"
        "    reachable: each of 8 agents reaches it\n"
        "    ...\n"
        "  done: its 24 drives take blocks\n"
    ),
    add_options=_add_options,
    run=_run,
    extra="admin",
)
