"""Views of ``ostraca fabric`` from the admin service.

Views: map, agents, drives, shards, volumes, capacity, and the placement of a block.
"""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import seconds_argument
from ostraca_cli.commands.admin.options import (
    add_action,
    client_of,
    print_list,
    print_resource,
    volume_argument,
    write_json,
)

_SOURCE = "Source: the admin service (`ostraca serve admin`)."


def add_views(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the view commands to ``ostraca fabric``."""
    for name, act, summary in (
        ("map", _show, "show a summary of the newest map"),
        ("agents", print_list, "list agents, with their own reports"),
        ("drives", print_list, "list drives, with health and wear"),
        ("shards", print_list, "list shards, with their owners"),
        ("volumes", print_list, "list volumes"),
        ("capacity", _show, "show capacity and usage of flash"),
    ):
        description = f"{summary[0].upper()}{summary[1:]}. {_SOURCE}"
        add_action(actions, name, partial(act, kind=name), summary=summary, description=description)
    place = add_action(
        actions,
        "place",
        _place,
        summary="show the location of a block",
        description=(
            f"Show the location of a block in the current placement epoch and in earlier epochs still\n"
            f"searched: enclosure, shard and owner. Its presence is told to its tenant only, by\n"
            f"`ostraca explain`. {_SOURCE}"
        ),
    )
    place.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="volume of the block")
    place.add_argument("hash", metavar="ENGINE_HASH", help="engine hash of the block, in hex")
    place.add_argument(
        "--root",
        metavar="HASH",
        help="first engine hash of the block's stripe unit: block 1, 33, 65 and so on in the chain (default: "
        "ENGINE_HASH, for blocks without a chain)",
    )
    prefetch = add_action(
        actions,
        "prefetch",
        _prefetch,
        summary="load the blocks of a chain into an agent's DRAM cache",
        description=(
            f"Load the blocks of a chain into an agent's DRAM cache, as a router does before sending a\n"
            f"request there. No block is delivered. {_SOURCE}"
        ),
    )
    prefetch.add_argument("volume", type=volume_argument, metavar="TENANT/NAME", help="volume of the blocks")
    prefetch.add_argument("agent", metavar="AGENT", help="the agent")
    prefetch.add_argument(
        "hashes", nargs="+", metavar="ENGINE_HASH", help="engine hashes of the blocks from the root, in hex"
    )
    prefetch.add_argument(
        "--deadline",
        type=seconds_argument,
        default=5.0,
        metavar="S",
        help="end of the prefetch, in seconds from now; later blocks are skipped (default: 5)",
    )
    for action in (place, prefetch):
        action.add_argument("--rank", type=int, default=0, metavar="N", help="rank (default: 0)")
        action.add_argument("--group", type=int, default=0, metavar="N", help="KV group (default: 0)")


def _show(options: argparse.Namespace, kind: str) -> int:
    return print_resource(options, kind, client_of(options).get(f"/v1/{kind}"))


def _place(options: argparse.Namespace) -> int:
    tenant, volume = options.volume
    query = {"tenant": tenant, "volume": volume, "hash": options.hash}
    query |= {"rank": options.rank, "group": options.group}
    query |= {} if options.root is None else {"root": options.root}
    return print_resource(options, "placement", client_of(options).get("/v1/placement", query))


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
    response = client_of(options).ask("POST", "/v1/prefetch", body)
    if options.json:
        write_json(response.body)
        return 0
    from ostraca_cli.commands.admin.responses import PrefetchInfo, read

    for each in read(response.body, PrefetchInfo).counts:
        print(f"{each.blocks} {each.state}" + (f" ({each.reason})" if each.reason != "NONE" else ""))
    return 0
