"""What ``ostraca fabric`` asks the admin service for: the map, agents, drives, shards, volumes,
capacity, and where a block belongs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ostraca.cli.admin.options import add_action, client_of, volume_argument, write_json, write_pages
from ostraca.cli.command import seconds_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FROM = "Asks the admin service (`ostraca serve admin`)."


def add_views(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Let the user look at a fabric."""
    for name, act, summary in (
        ("map", _map, "show the newest map in short"),
        ("agents", _agents, "list agents, with what each says of itself"),
        ("drives", _drives, "list drives, with their health and wear"),
        ("shards", _shards, "list shards, with their owners"),
        ("volumes", _volumes, "list volumes"),
        ("capacity", _capacity, "show how much flash there is, and how full it is"),
    ):
        description = f"{summary[0].upper()}{summary[1:]}. {_FROM}"
        add_action(actions, name, act, summary=summary, description=description)
    place = add_action(
        actions,
        "place",
        _place,
        summary="show where a block belongs",
        description=(
            f"Show where a block belongs, now and in each earlier placement that is still looked up: its\n"
            f"enclosure, its shard, and which agent owns that. Not whether it is there: `ostraca explain`\n"
            f"tells that to its tenant. {_FROM}"
        ),
    )
    place.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="its volume")
    place.add_argument("hash", metavar="ENGINE_HASH", help="its hash in the engine, in hex")
    place.add_argument(
        "--root",
        metavar="HASH",
        help="the hash that begins its stripe unit: of the 1st, 33rd, 65th ... block of its chain, the last "
        "one up to this (default: ENGINE_HASH, for blocks without a chain)",
    )
    place.add_argument("--rank", type=int, default=0, metavar="N", help="its rank (default: 0)")
    place.add_argument("--group", type=int, default=0, metavar="N", help="its KV group (default: 0)")

    prefetch = add_action(
        actions,
        "prefetch",
        _prefetch,
        summary="bring the blocks of a chain into an agent's DRAM",
        description=(
            f"Have an agent bring the blocks of one chain into its DRAM, as a router does before it sends a\n"
            f"request there. Nobody is handed a block. {_FROM}"
        ),
    )
    prefetch.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="their volume")
    prefetch.add_argument("agent", metavar="AGENT", help="the agent")
    prefetch.add_argument(
        "hashes",
        nargs="+",
        metavar="ENGINE_HASH",
        help="their engine hashes, in hex, from the root on",
    )
    prefetch.add_argument("--rank", type=int, default=0, metavar="N", help="their rank (default: 0)")
    prefetch.add_argument("--group", type=int, default=0, metavar="N", help="their KV group (default: 0)")
    prefetch.add_argument(
        "--deadline",
        type=seconds_argument,
        default=5.0,
        metavar="S",
        help="what is not there by then is left, in seconds (default: 5)",
    )


def _map(options: argparse.Namespace) -> int:
    if body := _asked(options, "/v1/map"):
        from ostraca.cli.admin.answers import Map, read
        from ostraca.cli.admin.view import map_view, show

        show(map_view(read(body, Map)))
    return 0


def _capacity(options: argparse.Namespace) -> int:
    if body := _asked(options, "/v1/capacity"):
        from ostraca.cli.admin.answers import Capacity, read
        from ostraca.cli.admin.view import capacity_view, show

        show(capacity_view(read(body, Capacity)))
    return 0


def _place(options: argparse.Namespace) -> int:
    tenant, volume = options.volume
    query = {"tenant": tenant, "volume": volume, "hash": options.hash}
    query |= {"rank": options.rank, "group": options.group}
    query |= {} if options.root is None else {"root": options.root}
    if body := _asked(options, "/v1/placement", query):
        from ostraca.cli.admin.answers import Placement, read
        from ostraca.cli.admin.view import placement_view, show

        show(placement_view(read(body, Placement)))
    return 0


def _prefetch(options: argparse.Namespace) -> int:
    tenant, volume = options.volume
    chain = {"engine_hashes": options.hashes, "rank": options.rank, "group": options.group}
    body = {
        "tenant": tenant,
        "volume": volume,
        "agent": options.agent,
        "chains": [chain],
        "deadline_s": options.deadline,
    }
    answer = client_of(options).ask("POST", "/v1/prefetch", body).body
    if options.json:
        write_json(answer)
        return 0
    from ostraca.cli.admin.answers import Prefetched, read

    for each in read(answer, Prefetched).counts:
        print(f"{each.blocks} {each.state}" + (f" ({each.reason})" if each.reason != "NONE" else ""))
    return 0


def _agents(options: argparse.Namespace) -> int:
    if pages := _listed(options, "/v1/agents"):
        from ostraca.cli.admin.answers import Agent, items
        from ostraca.cli.admin.view import agents_view, show

        show(agents_view(items(pages, Agent)))
    return 0


def _drives(options: argparse.Namespace) -> int:
    if pages := _listed(options, "/v1/drives"):
        from ostraca.cli.admin.answers import MapDrive, items
        from ostraca.cli.admin.view import drives_view, show

        show(drives_view(items(pages, MapDrive)))
    return 0


def _shards(options: argparse.Namespace) -> int:
    if pages := _listed(options, "/v1/shards"):
        from ostraca.cli.admin.answers import Shard, items
        from ostraca.cli.admin.view import shards_view, show

        show(shards_view(items(pages, Shard)))
    return 0


def _volumes(options: argparse.Namespace) -> int:
    if pages := _listed(options, "/v1/volumes"):
        from ostraca.cli.admin.answers import Volume, items
        from ostraca.cli.admin.view import show, volumes_view

        show(volumes_view(items(pages, Volume)))
    return 0


def _asked(
    options: argparse.Namespace, path: str, query: Mapping[str, str | int] | None = None
) -> bytes | None:
    """Return what is answered; None where that was all that was wanted, and is printed."""
    body = client_of(options).get(path, query).body
    if not options.json:
        return body
    write_json(body)
    return None


def _listed(options: argparse.Namespace, path: str) -> Iterator[bytes] | None:
    """Return the pages of a list; None where that was all that was wanted, and is printed."""
    pages = client_of(options).pages(path)
    if not options.json:
        return pages
    write_pages(pages)
    return None
