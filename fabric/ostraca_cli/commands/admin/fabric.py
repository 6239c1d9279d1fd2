"""Views of ``ostraca fabric`` from the admin service.

Views: map, agents, drives, shards, volumes, capacity, and the placement of a block.
"""

from __future__ import annotations

import argparse
from functools import partial

from ostraca_cli.command import AddOption, option, seconds_argument
from ostraca_cli.commands.admin.options import (
    client_of,
    print_list,
    print_resource,
    service_action,
    show,
    volume_argument,
)
from ostraca_cli.terminal.streams import write_line

_SOURCE = "Source: the admin service (`ostraca serve admin`)."
_VOLUME = option("volume", type=volume_argument, metavar="TENANT/NAME", help="volume of the blocks")
_RANK_AND_GROUP = (
    option("--rank", type=int, default=0, metavar="N", help="rank (default: 0)"),
    option("--group", type=int, default=0, metavar="N", help="KV group (default: 0)"),
)


def _place(options: argparse.Namespace) -> int:
    tenant, volume = options.volume
    query = {"tenant": tenant, "volume": volume, "hash": options.hash}
    query |= {"rank": options.rank, "group": options.group}
    query |= {} if options.root is None else {"root": options.root}
    return print_resource(options, "placement", client_of(options).get("/v1/placement", query))


def _prefetch(options: argparse.Namespace) -> int:
    tenant, volume = options.volume
    body = {
        "tenant": tenant,
        "volume": volume,
        "agent": options.agent,
        "chains": [{"engine_hashes": options.hashes, "rank": options.rank, "group": options.group}],
        "deadline_s": options.deadline,
    }
    response = client_of(options).ask("POST", "/v1/prefetch", body)
    if options.json:
        write_line(response.body)
        return 0
    from ostraca_admin.api.views import PrefetchView
    from ostraca_cli.commands.admin.responses import read

    for each in read(response.body, PrefetchView).counts:
        print(f"{each.blocks} {each.state}" + (f" ({each.reason})" if each.reason != "NONE" else ""))
    return 0


def _view(name: str, summary: str) -> AddOption:
    is_list = summary.startswith("list")
    act = partial(print_list, kind=name) if is_list else partial(show, kind=name, path=f"/v1/{name}")
    description = f"{summary[0].upper()}{summary[1:]}. {_SOURCE}"
    return service_action(name, act, summary=summary, description=description)


VIEWS = (
    _view("map", "show a summary of the newest map"),
    _view("agents", "list agents, with their own reports"),
    _view("drives", "list drives, with health and wear"),
    _view("shards", "list shards, with their owners"),
    _view("volumes", "list volumes"),
    _view("capacity", "show capacity and usage of flash"),
    service_action(
        "place",
        _place,
        _VOLUME,
        option("hash", metavar="ENGINE_HASH", help="engine hash of the block, in hex"),
        option(
            "--root",
            metavar="HASH",
            help="first engine hash of the block's stripe unit: block 1, 33, 65 and so on in the chain "
            "(default: ENGINE_HASH, for blocks without a chain)",
        ),
        *_RANK_AND_GROUP,
        summary="show the location of a block",
        description=(
            f"Show the location of a block in the current placement epoch and in earlier epochs still\n"
            f"searched: enclosure, shard and owner. Its presence is told to its tenant only, by\n"
            f"`ostraca explain`. {_SOURCE}"
        ),
    ),
    service_action(
        "prefetch",
        _prefetch,
        _VOLUME,
        option("agent", metavar="AGENT", help="the agent"),
        option(
            "hashes",
            nargs="+",
            metavar="ENGINE_HASH",
            help="engine hashes of the blocks from the root, in hex",
        ),
        option(
            "--deadline",
            type=seconds_argument,
            default=5.0,
            metavar="S",
            help="end of the prefetch, in seconds from now; later blocks are skipped (default: 5)",
        ),
        *_RANK_AND_GROUP,
        summary="load the blocks of a chain into an agent's DRAM cache",
        description=(
            f"Load the blocks of a chain into an agent's DRAM cache, as a router does before sending a\n"
            f"request there. No block is delivered. {_SOURCE}"
        ),
    ),
)
"""View actions of ``ostraca fabric``."""
