"""``ostraca serve``: daemons of a fabric.

``serve agent`` runs on each host; the other daemons have modules of their own.

The only line on stdout appears when the agent is ready. Logs go to stderr. The first Ctrl-C or SIGTERM hands
the shards over to other agents and ends in order; a second signal exits at once. After the crash of a part,
the agent also ends in order, with exit code 1, so that the service manager restarts the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.command import Command, one_action, run_action
from ostraca_cli.commands.serve.admin_command import ADMIN
from ostraca_cli.commands.serve.daemon_options import DaemonOption, daemon_action, exit_process, load_settings
from ostraca_cli.commands.serve.enclosure.command import ENCLOSURE
from ostraca_cli.commands.serve.notify import Notifier
from ostraca_cli.commands.serve.reload import FileReloader
from ostraca_cli.commands.serve.signals import first_of, start_or_stop, stop_on_signals
from ostraca_cli.composition.process_limits import check_descriptors, check_threads
from ostraca_cli.terminal.logs import log_to_stderr
from ostraca_cli.terminal.streams import READY, announce, unblock
from ostraca_fabric.runtime.sentences import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ostraca_cli.commands.serve.daemon import AgentDaemon
    from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
    from ostraca_fabric.telemetry.status import AgentStatus

log = logging.getLogger(__name__)

_DESCRIPTORS = 64
"""Open descriptors of an agent with NIXL, etcd, a few drives and a few workers' connections."""

_THREADS = 32
"""Threads of an agent with NIXL, etcd and a few drives."""

_OPTIONS = (
    DaemonOption("--id", "id", "NAME", "name of the agent in the fabric (default: host name)"),
    DaemonOption("--state-dir", "state_dir", "DIR", "state directory of this agent alone"),
    DaemonOption("--fabric", "fabric", "ID", "refuse any other fabric"),
    DaemonOption("--fabric-key", "fabric_key_file", "FILE", "key of the fabric, the same for all agents"),
    DaemonOption("--tokens", "tokens_file", "FILE", "tokens of tenants, and of the fabric"),
    DaemonOption("--http", "http_listen", "HOST:PORT", "serve /metrics, /healthz, /readyz and /status there"),
    DaemonOption(
        "--listen",
        "listen",
        "ADDRESS",
        "listen at unix://, tcp:// or tls:// (may be repeated)",
        is_list=True,
    ),
    DaemonOption(
        "--advertise",
        "advertise",
        "ADDRESS",
        "address for other agents, if not the listening address (may be repeated)",
        is_list=True,
    ),
    DaemonOption(
        "--transport",
        "transports",
        "NAME",
        "nixl or inline (may be repeated; default: nixl, else inline)",
        is_list=True,
    ),
)


def _run_agent(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
    from ostraca_cli.settings.load import AGENT_PREFIX

    settings = load_settings(options, _OPTIONS, DaemonSettings, prefix=AGENT_PREFIX)
    if settings is None:
        return 0
    from ostraca_cli.commands.serve.store import check_place
    from ostraca_cli.composition.memory_fit import fit_to_limits
    from ostraca_cli.composition.transports import loop_factory

    log_to_stderr(options, agent=settings.agent_id(), is_daemon=True)
    check_place(settings.etcd)
    check_descriptors(_DESCRIPTORS, consumer="an agent")
    check_threads(_THREADS, consumer="an agent")
    fit_to_limits(settings.memory)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return exit_process(runner.run(_serve(settings)))


async def _serve(settings: DaemonSettings) -> int:
    """Run the agent until a signal or a crash; return the exit code.

    HTTP pages and notifications to the service manager span the time from before the join until after the
    leave.
    """
    from ostraca_cli.commands.serve.daemon import AgentDaemon
    from ostraca_cli.commands.serve.state_directory import StateDirectory
    from ostraca_cli.composition.http_pages import serve_agent_pages

    unblock()
    where, notifier, has_crashed = settings.http_listen or None, Notifier(os.environ), False
    async with AsyncExitStack() as stack:
        state = stack.enter_context(StateDirectory(Path(settings.state_dir), f"agent {settings.agent_id()}"))
        daemon = AgentDaemon(settings, state)
        reloader = FileReloader(daemon.secret_files, daemon.readmit, look_s=settings.secrets_check_s)
        stop = stop_on_signals(reloader.look_now)
        await stack.enter_async_context(serve_agent_pages(where, {daemon.id: daemon.status}, settings.http))
        await stack.enter_async_context(notifier.watched())
        try:
            async with notifier.busy(lambda: daemon.life.sentence):
                is_up = await start_or_stop(daemon.start(), stop)
            if is_up:
                has_crashed = await _until(stop, daemon, notifier, reloader)
        finally:
            notifier.stopping("handing shards over to other agents")
            async with notifier.busy(lambda: daemon.life.sentence, within_s=settings.stop_limit_s):
                has_ended = await daemon.stop()
    if not has_ended:
        log.warning("A transfer may still be running: its memory stays mapped until the process ends.")
    log.info("Stopped.")
    return int(has_crashed)


async def _until(
    stop: asyncio.Event, daemon: AgentDaemon, notifier: Notifier, reloader: FileReloader
) -> bool:
    """Announce the agent and reload secrets, until *stop* or a crash.

    Returns whether a part of the agent crashed.
    """
    agent = daemon.agent
    assert agent is not None, "the agent was started"
    async with reloader.running():
        ready = ready_words(agent.status(), agent.addresses)
        announce(f"{READY}{ready}")
        notifier.ready(ready)
        await first_of(stop, agent.crashed)
        if not stop.is_set():
            log.error("A part of this agent has crashed: shutting down in order, for a restart.")
        log.info("Stopping: handing shards over to other agents. Another signal exits at once.")
        return not stop.is_set()


def ready_words(status: AgentStatus, addresses: Sequence[str]) -> str:
    """Return the address to connect to, and the agent's content."""
    shards, blocks = len(status.shards), sum(shard.blocks for shard in status.shards)
    return (
        f'ostraca.connect("{addresses[0]}")  # agent {status.agent}, {counted(shards, "shard")} served, '
        f"{counted(blocks, 'block')} found"
    )


_AGENT = daemon_action(
    "agent",
    _run_agent,
    _OPTIONS,
    summary="run this host's agent",
    description=(
        "Run an agent of a fabric in etcd, until SIGTERM. Without etcd the agent waits. Precedence:\n"
        "options, environment (OSTRACA_AGENT_...), settings file. Reference:\n"
        "docs/reference/daemon-settings.md for the process, docs/reference/settings.md for the agent."
    ),
)

COMMAND = Command(
    name="serve",
    summary="run a daemon of a fabric in etcd",
    description="Run a daemon of a fabric: see DAEMON --help.",
    example=(
        "  $ ostraca serve agent --settings /etc/ostraca/agent.toml --etcd etcd-0:2379\n"
        '  ready: ostraca.connect("unix:///run/ostraca/agent.sock")  '
        "# agent host-1, 4 shards served, 0 blocks found\n"
    ),
    options=(one_action(_AGENT, ADMIN, ENCLOSURE, metavar="DAEMON"),),
    run=run_action,
)
