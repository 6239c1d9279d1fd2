"""``ostraca up``: a whole fabric in a single process, until Ctrl-C.

The only line on stdout appears when the fabric is ready, so that scripts can wait for the line and read the
address. Logs go to stderr. The first Ctrl-C (or SIGTERM) stops in order: acknowledged blocks reach flash. A
second Ctrl-C exits at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca_cli.command import DRIVES, Command, count_argument, directory_option, option
from ostraca_cli.commands.serve.daemon_options import exit_process
from ostraca_cli.commands.serve.notify import Notifier
from ostraca_cli.commands.serve.reload import FileReloader
from ostraca_cli.commands.serve.signals import start_or_stop, stop_on_signals
from ostraca_cli.composition.http_pages import HTTP, serve_agent_pages
from ostraca_cli.composition.process_limits import check_descriptors, check_threads
from ostraca_cli.settings import SETTINGS_OPTIONS, as_toml, load, sources_of
from ostraca_cli.settings.load import AGENT_PREFIX
from ostraca_cli.terminal.logs import add_log_options, log_to_stderr
from ostraca_cli.terminal.streams import READY, announce, unblock
from ostraca_cli.terminal.units import size_argument, size_text
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.sockets.default_paths import TOKEN_FILE, agent_socket, default_directory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ostraca_cli.composition.embedded import FabricPlan
    from ostraca_fabric.telemetry.status import AgentStatus

log = logging.getLogger(__name__)

_TRANSPORTS = ("nixl", "inline")
_DRAM_BYTES = 512 << 20

_DESCRIPTORS = 48
"""Open descriptors of a process with NIXL and eight workers' connections, without drives and agents' sockets.
"""

_THREADS = 16
"""Threads of a process with NIXL, beside one or two for each drive; 12 were measured with two drives."""


def _run(options: argparse.Namespace) -> int:
    log_to_stderr(options, agent="agent-0" if options.agents == 1 else "")
    from ostraca_cli.composition.transports import loop_factory
    from ostraca_fabric.wire.address import parse_address

    options.dir = options.dir or default_directory(os.environ)
    parse_address(
        f"unix://{agent_socket(options.dir, options.agents - 1)}"
    )  # raises before any file is created
    plan, origins = _plan(options)
    if options.print_settings:
        print(as_toml(plan.agent_settings(), origins), end="")
        return 0
    parts = 2 * plan.agents + plan.enclosures * plan.drives
    check_descriptors(_DESCRIPTORS + parts, consumer="this fabric")
    check_threads(_THREADS + parts, consumer="this fabric")
    plan = _fitted(plan, origins)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        has_ended = runner.run(_serve(plan, options.http))
    if not has_ended:
        log.warning("A transfer may still be running: its memory stays mapped until the process ends.")
        exit_process(0)
    return 0


def _plan(options: argparse.Namespace) -> tuple[FabricPlan, Mapping[str, str]]:
    """Return the requested plan, and the origin of each agent setting.

    Raises UsageError.
    """
    from ostraca_cli.composition.embedded import FabricPlan
    from ostraca_dpu_agent.settings import AgentSettings

    loaded = load(AgentSettings, sources_of(options), prefix=AGENT_PREFIX)
    memory, dram_bytes, origins = loaded.settings.memory, options.dram, dict(loaded.origins)
    if dram_bytes is not None:
        origins["memory.cache_bytes"] = "--dram"
    elif "memory.cache_bytes" in origins:
        dram_bytes = memory.cache_bytes * options.agents
    plan = FabricPlan(
        directory=options.dir,
        agents=options.agents,
        enclosures=options.enclosures,
        drives=options.drives,
        capacity_bytes=options.capacity,
        dram_bytes=_DRAM_BYTES if dram_bytes is None else dram_bytes,
        staging_bytes=memory.staging_bytes,
        transports=_transports(options.transport),
        addresses=_tcp_addresses(options.listen),
        flushes=options.flush,
        direct_reads_tenant=options.direct_reads,
        settings=loaded.settings,
    )
    return plan, origins


def _fitted(plan: FabricPlan, explicit: Collection[str]) -> FabricPlan:
    """Return the plan with memory within the process limits; raises ResourceError."""
    from ostraca_cli.composition.memory_fit import fit_to_limits

    memory = plan.agent_settings().memory
    lower = fit_to_limits(memory, plan.agents, explicit)
    if lower == memory:
        return plan
    return replace(plan, staging_bytes=lower.staging_bytes, dram_bytes=lower.cache_bytes * plan.agents)


async def _serve(plan: FabricPlan, http: str | None) -> bool:
    """Run the fabric until a signal; return whether every transfer has ended."""
    from ostraca_cli.composition.embedded import EmbeddedFabric

    unblock()
    stop, notifier = stop_on_signals(), Notifier(os.environ)
    fabric = EmbeddedFabric(plan)
    try:
        is_up = await start_or_stop(fabric.start(), stop)
    except UsageError as error:
        drives = counted(plan.enclosures * plan.drives, "drive")
        raise UsageError(f"{error} (--capacity is {size_text(plan.capacity_bytes)} for {drives})") from error
    if not is_up:
        log.info("Stopped before readiness. Blocks stay in %s.", plan.directory)
        return True
    if plan.addresses:
        log.info(
            "Workers over TCP need the token in %s: connect(..., credentials=...)",
            plan.directory / TOKEN_FILE,
        )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(
                serve_agent_pages(http, fabric.status_functions, plan.settings.http)
            )
        except OstracaError:
            await fabric.stop()
            raise
        if plan.addresses:
            look_s = plan.settings.secrets_check_s  # a replaced token is accepted meanwhile
            reloader = FileReloader([plan.directory / TOKEN_FILE], fabric.readmit, look_s=look_s)
            await stack.enter_async_context(reloader.running())
        await stack.enter_async_context(notifier.watched())
        ready = ready_line(fabric.addresses, plan, fabric.status())
        announce(ready)
        notifier.ready(ready.removeprefix(READY))
        await stop.wait()
        log.info("Stopping: no new requests, staged blocks go to flash. Another Ctrl-C exits at once.")
        notifier.stopping("writing staged blocks to flash")
        has_ended = await fabric.stop()
    log.info("Stopped. Blocks stay in %s.", plan.directory)
    return has_ended


def ready_line(addresses: Sequence[str], plan: FabricPlan, statuses: Sequence[AgentStatus]) -> str:
    """Return the ready line: address to connect to, and size of the fabric."""
    where = ", ".join(f'"{address}"' for address in addresses)
    argument = where if len(addresses) == 1 else f"[{where}]"
    blocks = sum(shard.blocks for status in statuses for shard in status.shards)
    drives = counted(plan.enclosures * plan.drives, "drive")
    unusable = {drive.drive for status in statuses for drive in status.unserved.drives}
    counts = (
        counted(plan.agents, "agent"),
        counted(plan.enclosures, "enclosure"),
        f"{drives} ({len(unusable)} unusable)" if unusable else drives,
        size_text(plan.capacity_bytes),
        f"{counted(blocks, 'block')} found",
    )
    return f"{READY}ostraca.connect({argument})  # {', '.join(counts)}"


def _tcp_addresses(listed: Sequence[str]) -> tuple[str, ...]:
    from ostraca_fabric.wire.address import TcpAddress, parse_address

    for each in listed:
        if not isinstance(parse_address(each), TcpAddress):
            raise UsageError(
                f"--listen {each} is no TCP address: give tcp://host:port; unix sockets are in --dir"
            )
    return tuple(listed)


def _transports(wanted: str | None) -> tuple[str, ...]:
    from ostraca_fabric.nixl.runtime import package

    if wanted == "nixl" and package() is None:
        raise UsageError("--transport nixl needs NIXL: pip install 'ostraca[agent]'")
    return (wanted,) if wanted else _TRANSPORTS


COMMAND = Command(
    name="up",
    summary="run a whole fabric in this process, for a laptop",
    description=(
        "Run a whole fabric in one process: agents, enclosures, and files as drives. Blocks outlive the\n"
        "process: start again with the same --dir. Prints the connect call when ready; Ctrl-C stops."
    ),
    example=(
        "  $ ostraca up --dir /tmp/fabric --capacity 1GiB\n"
        '  ready: ostraca.connect("unix:///tmp/fabric/agent-0.sock")  '
        "# 1 agent, 1 enclosure, 2 drives, 1.0 GiB, 0 blocks found\n"
    ),
    options=(
        directory_option("directory of the fabric's drives and sockets"),
        option("--agents", type=count_argument, default=1, metavar="N", help="agents (default: 1)"),
        option("--enclosures", type=count_argument, default=1, metavar="N", help="enclosures (default: 1)"),
        DRIVES,
        option(
            "--capacity",
            type=size_argument,
            default="4GiB",
            metavar="SIZE",
            help="flash of the whole fabric, as files in DIR (default: 4GiB)",
        ),
        option(
            "--dram",
            type=size_argument,
            metavar="SIZE",
            help="total size of all agents' DRAM caches; 0 for none (default: 512MiB, or memory.cache_bytes)",
        ),
        option(
            "--transport",
            choices=_TRANSPORTS,
            help="the only transport for blocks (default: NIXL if installed, else inline)",
        ),
        option(
            "--listen",
            action="append",
            default=[],
            metavar="ADDRESS",
            help="also listen on TCP: tcp://host:port, port 0 for any free port (may be repeated). Workers "
            f"use the token in DIR/{TOKEN_FILE}. TCP is not encrypted: use trusted networks only",
        ),
        option(
            "--flush",
            action="store_true",
            help="flush drives before reporting a block as committed, for durability across power cuts; "
            "costs two flushes of the disk below DIR for each group of puts",
        ),
        option(
            "--direct-reads",
            default="",
            metavar="TENANT",
            help="let workers of TENANT read drives themselves; the fabric then refuses every other tenant",
        ),
        HTTP,
        *SETTINGS_OPTIONS,
        add_log_options,
    ),
    run=_run,
)
