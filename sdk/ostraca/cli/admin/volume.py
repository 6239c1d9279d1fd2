"""``ostraca volume``: volumes of a fabric, and the switch of each."""

from __future__ import annotations

import argparse

from ostraca.cli.admin.options import add_action, client_of, volume_argument, write_json, write_pages
from ostraca.cli.command import Command

_SWITCHES = ("off", "shadow", "on")


def _add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_action(
        actions,
        "list",
        _list,
        summary="list all volumes",
        description="List all volumes by tenant and name, each with its switch.",
    )
    show = add_action(
        actions, "show", _show, summary="show one", description="Show a volume, its switch and its ETag."
    )
    _add_volume(show)
    switch = add_action(
        actions,
        "switch",
        _switch,
        summary="switch one off or on, or try it out",
        description=(
            "Say what is to become of requests for a volume. off: every block is declined at once, so\n"
            "that workers recompute it; nothing is looked up, loaded or stored. shadow: gets load and\n"
            "verify, and hand nothing over, while puts go on: metrics tell what would have come. on: as\n"
            "always. Agents that hear of etcd obey within a second."
        ),
    )
    _add_volume(switch)
    switch.add_argument("switch", choices=_SWITCHES, help="what is to become of requests for it")
    switch.add_argument(
        "--if-match", default="", metavar="ETAG", help="only if it was not switched since, as `show` says it"
    )


def _add_volume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="the volume")


def _path(options: argparse.Namespace) -> str:
    """Return where the service has the volume."""
    from ostraca.cli.admin.client import quoted

    return "/".join(("/v1/volumes", *map(quoted, options.volume)))


def _list(options: argparse.Namespace) -> int:
    pages = client_of(options).pages("/v1/volumes")
    if options.json:
        write_pages(pages)
        return 0
    from ostraca.cli.admin.answers import Volume, items
    from ostraca.cli.admin.view import show, volumes_view

    show(volumes_view(items(pages, Volume)))
    return 0


def _show(options: argparse.Namespace) -> int:
    answer = client_of(options).get(_path(options))
    if options.json:
        write_json(answer.body)
        return 0
    from ostraca.cli.admin.answers import Volume, read
    from ostraca.cli.admin.view import show, volume_view

    show(volume_view(read(answer.body, Volume), answer.etag))
    return 0


def _switch(options: argparse.Namespace) -> int:
    answer = client_of(options).ask(
        "PUT", f"{_path(options)}/switch", {"switch": options.switch}, if_match=options.if_match
    )
    if options.json:
        write_json(answer.body)
        return 0
    from ostraca.cli.admin.answers import Volume, read
    from ostraca.cli.admin.text import printable

    volume = read(answer.body, Volume)
    print(printable(f"volume {volume.tenant}/{volume.name}: {volume.switch}"))
    return 0


def _run(options: argparse.Namespace) -> int:
    code: int = options.act(options)
    return code


COMMAND = Command(
    name="volume",
    summary="list volumes, and switch them off or on",
    description=(
        "Ask the admin service (`ostraca serve admin`) about volumes, and switch them. See ACTION --help."
    ),
    example="  $ ostraca volume switch acme/llama-70b off\n  volume acme/llama-70b: off\n",
    add_options=_add_options,
    run=_run,
    extra="admin",
)
