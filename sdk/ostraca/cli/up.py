"""``ostraca up``: a whole fabric in one process, until Ctrl-C.

Exactly one line goes to stdout, when the fabric is ready, so that a script can wait for it and read the
address. Logs go to stderr. The first Ctrl-C (or SIGTERM) stops in order, so that what was acknowledged is on
flash; a second one leaves at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.cli.command import Command, count_argument
from ostraca.cli.http import add_http_option, http_pages
from ostraca.cli.logs import add_log_options, log_to_stderr
from ostraca.cli.settings import add_settings_options, as_toml, load, sources_of
from ostraca.cli.sizes import size_argument, size_text
from ostraca.places import TOKEN_FILE, agent_socket, default_directory, directory_argument
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from ostraca.cli.embedded import EmbeddedFabric, FabricPlan
    from ostraca_fabric.status import AgentStatus

log = logging.getLogger(__name__)

AGENT_PREFIX = "OSTRACA_AGENT_"
"""What the environment variables that set an agent's settings begin with."""

READY = "ready: "
"""What the ready line begins with."""

_TRANSPORTS = ("nixl", "inline")
_DRAM_BYTES = 512 << 20


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=directory_argument,
        default=default_directory(os.environ),
        help="where the fabric keeps its drives and sockets, and finds them again (default: %(default)s)",
    )
    parser.add_argument("--agents", type=count_argument, default=1, metavar="N", help="agents (default: 1)")
    parser.add_argument(
        "--enclosures", type=count_argument, default=1, metavar="N", help="enclosures (default: 1)"
    )
    parser.add_argument(
        "--drives", type=count_argument, default=2, metavar="N", help="drives of each enclosure (default: 2)"
    )
    parser.add_argument(
        "--capacity",
        type=size_argument,
        default="4GiB",
        metavar="SIZE",
        help="flash of the whole fabric, as files in DIR (default: 4GiB)",
    )
    parser.add_argument(
        "--dram",
        type=size_argument,
        metavar="SIZE",
        help="DRAM caches of all agents together; 0 for none (default: 512MiB, unless settings have "
        "memory.cache_bytes)",
    )
    parser.add_argument(
        "--blocks-per-shard",
        type=count_argument,
        metavar="N",
        help="let the index of a drive list N blocks at most, which takes 48 bytes of memory each; beyond it "
        "the oldest blocks go, though the drive is not full (default: owner.blocks_per_shard_max, 1048576)",
    )
    parser.add_argument(
        "--dwpd",
        type=_dwpd_argument,
        metavar="N",
        help="write no more than a drive rated for N drive writes per day lasts with, and decline puts of "
        "what is least worth it (default: write everything)",
    )
    parser.add_argument(
        "--transport",
        choices=_TRANSPORTS,
        help="move blocks by this alone (default: NIXL where it is installed, else inline)",
    )
    parser.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="let workers connect over TCP, too: tcp://host:port, port 0 for any free one (may be repeated). "
        f"They show the token in DIR/{TOKEN_FILE}. TCP is not encrypted: listen on networks you trust",
    )
    parser.add_argument(
        "--flush",
        action="store_true",
        help="flush drives before a block is called committed, so that a power cut does not lose it; slower "
        "by two flushes of the disk below DIR for each group of puts",
    )
    add_http_option(parser)
    add_settings_options(parser)
    add_log_options(parser)


def _dwpd_argument(text: str) -> float:
    try:
        dwpd = float(text)
    except ValueError:
        dwpd = -1.0
    if not 0 <= dwpd < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no rating: write drive writes per day, as 0.3 or 1")
    return dwpd


def _run(options: argparse.Namespace) -> int:
    log_to_stderr(options, agent="agent-0" if options.agents == 1 else "")
    from ostraca.cli.transports import loop_factory
    from ostraca_fabric.wire.address import parse_address

    parse_address(
        f"unix://{agent_socket(options.dir, options.agents - 1)}"
    )  # or raise before anything is made
    plan, origins = _plan(options)
    if options.print_settings:
        print(as_toml(plan.agent_settings(), origins), end="")
        return 0
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        has_ended = runner.run(_serve(plan, options.http))
    if not has_ended:
        log.warning(
            "A transfer is not known to have ended; its memory stays mapped until the process is gone."
        )
        # Not through the interpreter's shutdown, which unmaps memory while NIXL's threads still run.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _plan(options: argparse.Namespace) -> tuple[FabricPlan, Mapping[str, str]]:
    """Return what was asked for, and where its agents' settings were given. Raises UsageError."""
    from ostraca.cli.embedded import FabricPlan
    from ostraca_dpu_agent.settings import AgentSettings

    loaded = load(AgentSettings, sources_of(options), prefix=AGENT_PREFIX)
    memory, owner = loaded.settings.memory, loaded.settings.owner
    dram_bytes, blocks, dwpd = options.dram, options.blocks_per_shard, options.dwpd
    if dram_bytes is None:
        is_set = "memory.cache_bytes" in loaded.origins
        dram_bytes = memory.cache_bytes * options.agents if is_set else _DRAM_BYTES
    plan = FabricPlan(
        directory=options.dir,
        agents=options.agents,
        enclosures=options.enclosures,
        drives=options.drives,
        capacity_bytes=options.capacity,
        dram_bytes=dram_bytes,
        staging_bytes=memory.staging_bytes,
        transports=_transports(options.transport),
        addresses=_tcp_addresses(options.listen),
        endurance=owner.endurance if dwpd is None else replace(owner.endurance, rated_dwpd=dwpd),
        blocks_per_shard_max=owner.blocks_per_shard_max if blocks is None else blocks,
        flushes=options.flush,
        settings=loaded.settings,
    )
    flags = {"memory.cache_bytes": "--dram", "owner.blocks_per_shard_max": "--blocks-per-shard"}
    flags["owner.endurance.rated_dwpd"] = "--dwpd"
    given = zip(flags.items(), (options.dram, blocks, dwpd), strict=True)
    by_flag = {name: flag for (name, flag), value in given if value is not None}
    return plan, {**loaded.origins, **by_flag}


async def _serve(plan: FabricPlan, http: str | None) -> bool:
    """Run the fabric until a signal; return whether every transfer has ended."""
    from ostraca.cli.embedded import EmbeddedFabric
    from ostraca.cli.serve.notify import Notifier
    from ostraca.cli.serve.signals import stop_on_signals

    stop, notifier = stop_on_signals(), Notifier(os.environ)
    fabric = EmbeddedFabric(plan)
    try:
        await fabric.start()
    except UsageError as error:
        drives = counted(plan.enclosures * plan.drives, "drive")
        raise UsageError(f"{error} (--capacity is {size_text(plan.capacity_bytes)} for {drives})") from error
    if plan.addresses:
        log.info(
            "Workers over TCP show the token in %s: connect(..., credentials=...)",
            plan.directory / TOKEN_FILE,
        )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(http_pages(http, fabric.looks, plan.settings.http))
        except OstracaError:
            await fabric.stop()
            raise
        if plan.addresses:
            await stack.enter_async_context(_rereading_token(fabric, plan))
        await stack.enter_async_context(notifier.watched())
        ready = ready_line(fabric.addresses, plan, fabric.status())
        print(ready, flush=True)
        notifier.ready(ready.removeprefix(READY))
        await stop.wait()
        log.info("Stopping: no new requests, and staged blocks go to flash. Another Ctrl-C leaves at once.")
        notifier.stopping("staged blocks go to flash")
        has_ended = await fabric.stop()
    log.info("Stopped. The blocks stay in %s.", plan.directory)
    return has_ended


@asynccontextmanager
async def _rereading_token(fabric: EmbeddedFabric, plan: FabricPlan) -> AsyncIterator[None]:
    """Let in by the token that lies in the directory, also when that is replaced meanwhile."""
    from ostraca.cli.serve.reloading import Reloading
    from ostraca_fabric.tasks import Tasks

    file = plan.directory / TOKEN_FILE
    reloading = Reloading(str(file), [file], fabric.readmit, look_s=plan.settings.secrets_look_s)
    looking = Tasks("the workers' token")
    looking.spawn(reloading.run())
    try:
        yield
    finally:
        await looking.stop()


def ready_line(addresses: Sequence[str], plan: FabricPlan, statuses: Sequence[AgentStatus]) -> str:
    """Return the line that says how to connect, and what to."""
    where = ", ".join(f'"{address}"' for address in addresses)
    argument = where if len(addresses) == 1 else f"[{where}]"
    blocks = sum(shard.blocks for status in statuses for shard in status.shards)
    counts = (
        counted(plan.agents, "agent"),
        counted(plan.enclosures, "enclosure"),
        counted(plan.enclosures * plan.drives, "drive"),
        size_text(plan.capacity_bytes),
        f"{counted(blocks, 'block')} found",
    )
    return f"{READY}ostraca.connect({argument})  # {', '.join(counts)}"


def _tcp_addresses(listed: Sequence[str]) -> tuple[str, ...]:
    from ostraca_fabric.wire.address import TcpAddress, parse_address

    for each in listed:
        if not isinstance(parse_address(each), TcpAddress):
            raise UsageError(f"--listen {each}: take tcp://host:port; unix sockets lie in --dir")
    return tuple(listed)


def _transports(wanted: str | None) -> tuple[str, ...]:
    from ostraca_fabric.adapters.nixl_runtime import package

    if wanted == "nixl" and package() is None:
        raise UsageError("--transport nixl needs NIXL; install it with: pip install 'ostraca[agent]'")
    return (wanted,) if wanted else _TRANSPORTS


COMMAND = Command(
    name="up",
    summary="run a whole fabric in this process, for a laptop",
    description=(
        "Run a whole fabric in one process: agents, enclosures and drives that are files. The blocks\n"
        "outlive it: started again with the same --dir, it finds them. Once it is ready it prints how to\n"
        "connect; Ctrl-C stops it."
    ),
    example=(
        "  $ ostraca up --dir /tmp/fabric --capacity 1GiB\n"
        '  ready: ostraca.connect("unix:///tmp/fabric/agent-0.sock")  '
        "# 1 agent, 1 enclosure, 2 drives, 1.0 GiB, 0 blocks found\n"
    ),
    add_options=_add_options,
    run=_run,
)
