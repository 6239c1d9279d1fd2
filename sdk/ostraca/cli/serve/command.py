"""``ostraca serve``: the daemons of a fabric. ``serve agent`` is the one that a host runs; the others are in
modules of their own.

Exactly one line goes to stdout, when the agent is ready. Logs go to stderr. The first Ctrl-C or SIGTERM
leaves the shards to other agents and ends in order; a second one leaves at once. An agent of which a part has
crashed ends in order, too, with 1, so that whoever keeps it starts it anew.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.command import Command
from ostraca.cli.etcd_place import add_etcd_options, etcd_options
from ostraca.cli.logs import add_log_options, log_to_stderr
from ostraca.cli.serve.admin_command import add_admin
from ostraca.cli.serve.enclosure.command import add_enclosure
from ostraca.cli.settings import add_settings_options, as_toml, load, sources_of
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca.cli.serve.daemon import AgentDaemon
    from ostraca.cli.serve.daemon_settings import DaemonSettings
    from ostraca.cli.serve.notify import Notifier
    from ostraca.cli.serve.reloading import Reloading
    from ostraca.cli.settings import Loaded
    from ostraca_fabric.status import AgentStatus

log = logging.getLogger(__name__)

_OPTIONS = (
    ("--id", "id", "NAME", "what the agent is called in the fabric (default: as the machine is)"),
    ("--state-dir", "state_dir", "DIR", "a directory of its own"),
    ("--fabric", "fabric", "ID", "refuse any other fabric than this"),
    ("--fabric-key", "fabric_key_file", "FILE", "the fabric's key, the same for all agents"),
    ("--tokens", "tokens_file", "FILE", "who may speak for whom"),
    ("--http", "http_listen", "HOST:PORT", "serve /metrics, /healthz, /readyz and /status there"),
)
_LISTS = (
    ("--listen", "listen", "ADDRESS", "where it listens: unix://, tcp:// or tls:// (may be repeated)"),
    ("--advertise", "advertise", "ADDRESS", "where others reach it, if not there (may be repeated)"),
    ("--transport", "transports", "NAME", "nixl or inline (may be repeated; default: nixl, else inline)"),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    daemons = parser.add_subparsers(metavar="DAEMON", required=True)
    agent = daemons.add_parser(
        "agent",
        help="run this host's agent",
        description=(
            "Run one agent of a fabric that etcd keeps, until SIGTERM. While etcd is away it waits. Options\n"
            "win over the environment (OSTRACA_AGENT_...), and that over the settings file; see\n"
            "docs/reference/daemon-settings.md for what the options say and more of the process, and\n"
            "docs/reference/settings.md for all else that an agent may be set."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, name, metavar, meaning in _OPTIONS:
        agent.add_argument(flag, dest=name, metavar=metavar, help=meaning)
    for flag, name, metavar, meaning in _LISTS:
        agent.add_argument(flag, dest=name, metavar=metavar, help=meaning, action="append", default=[])
    add_etcd_options(agent)
    add_settings_options(agent)
    add_log_options(agent)
    agent.set_defaults(serve=_run_agent)
    add_admin(daemons)
    add_enclosure(daemons)


def _run(options: argparse.Namespace) -> int:
    code: int = options.serve(options)
    return code


def _run_agent(options: argparse.Namespace) -> int:
    loaded = _loaded(options)
    if options.print_settings:
        print(as_toml(loaded.settings, loaded.origins), end="")
        return 0
    from ostraca.cli.serve.store import check_place
    from ostraca.cli.transports import loop_factory

    log_to_stderr(options, agent=loaded.settings.agent_id(), is_daemon=True)
    check_place(loaded.settings.etcd)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        code = runner.run(_serve(loaded.settings))
        # All is closed that others could miss. Not through the interpreter's shutdown: it closes the loop and
        # unmaps memory while threads of grpc and NIXL still run, and use them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)


def _loaded(options: argparse.Namespace) -> Loaded[DaemonSettings]:
    """Return the settings that were asked for. Raises SettingsError."""
    from ostraca.cli.serve.daemon_settings import DaemonSettings
    from ostraca.cli.up import AGENT_PREFIX

    given = [(flag, name, getattr(options, name)) for flag, name, _, _ in (*_OPTIONS, *_LISTS)]
    also = [each for each in given if each[2]]
    also += [(flag, f"etcd.{name}", value) for flag, name, value in etcd_options(options)]
    return load(DaemonSettings, sources_of(options, also), prefix=AGENT_PREFIX)


async def _serve(settings: DaemonSettings) -> int:
    """Run the agent until a signal, or until a part of it crashes; return what the process ends with.

    Its pages are there, and the service manager hears of it, from before it joins until after it has left.
    """
    from ostraca.cli.http import http_pages
    from ostraca.cli.serve.daemon import AgentDaemon
    from ostraca.cli.serve.notify import Notifier
    from ostraca.cli.serve.reloading import Reloading
    from ostraca.cli.serve.signals import started, stop_on_signals
    from ostraca.cli.serve.state_directory import StateDirectory

    where, notifier, has_crashed = settings.http_listen or None, Notifier(os.environ), False
    async with AsyncExitStack() as stack:
        state = stack.enter_context(StateDirectory(Path(settings.state_dir), f"agent {settings.agent_id()}"))
        daemon = AgentDaemon(settings, state)
        files = daemon.secret_files
        reloading = Reloading(
            ", ".join(map(str, files)), files, daemon.readmit, look_s=settings.secrets_look_s
        )
        stop = stop_on_signals(reloading.look_now)
        await stack.enter_async_context(http_pages(where, {daemon.id: daemon.status}, settings.http))
        await stack.enter_async_context(notifier.watched())
        try:
            async with notifier.busy(lambda: daemon.life.sentence):
                is_up = await started(daemon.start(), stop)
            if is_up:
                has_crashed = await _until(stop, daemon, notifier, reloading)
        finally:
            notifier.stopping("the shards go to other agents")
            async with notifier.busy(lambda: daemon.life.sentence, within_s=daemon.stops_within_s):
                has_ended = await daemon.stop()
    if not has_ended:
        log.warning(
            "A transfer is not known to have ended; its memory stays mapped until the process is gone."
        )
    log.info("Stopped.")
    return int(has_crashed)


async def _until(stop: asyncio.Event, daemon: AgentDaemon, notifier: Notifier, reloading: Reloading) -> bool:
    """Say that the agent is ready, and read changed secrets, until *stop*, or until a part of it crashes; say
    whether one did.
    """
    from ostraca.cli.up import READY
    from ostraca_fabric.tasks import Tasks

    agent, looking = daemon.agent, Tasks("files of secrets")
    assert agent is not None, "it was started"
    looking.spawn(reloading.run())
    try:
        ready = f"{READY}{ready_words(agent.status(), agent.addresses)}"
        print(ready, flush=True)
        notifier.ready(ready.removeprefix(READY))
        waiting = [looking.spawn(event.wait()) for event in (stop, agent.crashed)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            log.error("A part of this agent has crashed: it ends in order, and is to be started anew.")
        log.info("Stopping: the shards go to other agents. Another signal leaves at once.")
        return not stop.is_set()
    finally:
        await looking.stop()


def ready_words(status: AgentStatus, addresses: Sequence[str]) -> str:
    """Say how to connect, and to what."""
    shards, blocks = len(status.shards), sum(shard.blocks for shard in status.shards)
    return (
        f'ostraca.connect("{addresses[0]}")  # agent {status.agent}, {counted(shards, "shard")} served, '
        f"{counted(blocks, 'block')} found"
    )


COMMAND = Command(
    name="serve",
    summary="run a daemon of a fabric that etcd keeps",
    description="Run one of a fabric's daemons: see DAEMON --help.",
    example=(
        "  $ ostraca serve agent --settings /etc/ostraca/agent.toml --etcd etcd-0:2379\n"
        '  ready: ostraca.connect("unix:///run/ostraca/agent.sock")  '
        "# agent host-1, 4 shards served, 0 blocks found\n"
    ),
    add_options=_add_options,
    run=_run,
)
