"""``ostraca serve enclosure``: the options, and the process's life.

Exactly one line goes to stdout, when drives are exported. Logs go to stderr. The first Ctrl-C or SIGTERM ends
the daemon in order, and leaves what it exports to hosts and to its next start; a second one leaves at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.etcd_place import add_etcd_options, etcd_options
from ostraca.cli.logs import add_log_options, log_to_stderr
from ostraca.cli.settings import add_settings_options, as_toml, load, sources_of
from ostraca_fabric.sentences import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ostraca.cli.serve.enclosure.daemon import EnclosureDaemon
    from ostraca.cli.serve.enclosure.settings import EnclosureDaemonSettings
    from ostraca.cli.settings import Loaded

log = logging.getLogger(__name__)

ENCLOSURE_PREFIX = "OSTRACA_ENCLOSURE_"
"""What the environment variables that set an enclosure's settings begin with."""

_OPTIONS = (
    ("--id", "id", "NAME", "what the enclosure is called in the fabric (default: as the machine is)"),
    ("--nqn", "nqn", "NQN", "its subsystem's qualified name (default: made of the id)"),
    ("--files", "files", "DIR", "drives are files in this directory, not this machine's NVMe drives"),
    ("--drives", "file_drives", "N", "so many files; those that are missing are made"),
    ("--drive-size", "file_drive_bytes", "SIZE", "the size of files that are made (default: 1GiB)"),
    ("--hosts", "hosts_file", "FILE", "which hosts may connect, with their secrets (default: every host)"),
    ("--state-dir", "state_dir", "DIR", "a directory of its own"),
    ("--fabric", "fabric", "ID", "refuse any other fabric than this"),
    ("--http", "http_listen", "HOST:PORT", "serve /metrics, /healthz, /readyz and /status there"),
)
_LISTS = (
    (
        "--listen",
        "listen",
        "CONTROLLER",
        "rdma://ADDRESS:PORT, tcp://ADDRESS:PORT or files:///DIR (may be repeated, those to prefer first)",
    ),
    (
        "--drive",
        "drives",
        "NAME",
        "export this drive: name, device, NGUID or serial number (may be repeated; default: all fit ones)",
    ),
)
_FLAGS = (
    ("--force", "force", "export drives that are not fit, as in laboratories"),
    ("--withdraw", "withdraw", "export nothing any more when the daemon ends"),
)  # fmt: skip


def add_enclosure(daemons: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``enclosure`` to the daemons of ``ostraca serve``."""
    parser = daemons.add_parser(
        "enclosure",
        help="export this machine's drives",
        description=(
            "Export the drives of an enclosure over NVMe-oF, or as files, and report how they are, until\n"
            "SIGTERM. What is exported stays then, and while etcd is away. Options win over the environment\n"
            "(OSTRACA_ENCLOSURE_...), and that over the settings file; see\n"
            "docs/reference/enclosure-settings.md for all there is to set."
        ),
        epilog=(
            "example:\n"
            "  $ ostraca serve enclosure --id shelf-1 --listen rdma://10.0.8.1:4420 --hosts "
            "/etc/ostraca/hosts.toml \\\n"
            "      --etcd etcd-0:2379\n"
            "  ready: enclosure shelf-1 exports 24 drives as nqn.2025-01.io.ostraca:shelf-1 at "
            "rdma://10.0.8.1:4420\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, name, metavar, meaning in _OPTIONS:
        parser.add_argument(flag, dest=name, metavar=metavar, help=meaning)
    for flag, name, metavar, meaning in _LISTS:
        parser.add_argument(flag, dest=name, metavar=metavar, help=meaning, action="append", default=[])
    for flag, name, meaning in _FLAGS:
        parser.add_argument(flag, dest=name, help=meaning, action="store_const", const="true", default="")
    add_etcd_options(parser)
    add_settings_options(parser)
    add_log_options(parser)
    parser.set_defaults(serve=_run)


def _run(options: argparse.Namespace) -> int:
    loaded = _loaded(options)
    if options.print_settings:
        print(as_toml(loaded.settings, loaded.origins), end="")
        return 0
    from ostraca.cli.serve.store import check_place

    settings = loaded.settings
    settings.target()
    log_to_stderr(options)
    check_place(settings.etcd)
    asyncio.run(_serve(settings))
    # Not through the interpreter's shutdown: it closes what threads of grpc still use.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _loaded(options: argparse.Namespace) -> Loaded[EnclosureDaemonSettings]:
    """Return the settings that were asked for. Raises SettingsError."""
    from ostraca.cli.serve.enclosure.settings import EnclosureDaemonSettings

    given = [(flag, name, getattr(options, name)) for flag, name, _, _ in (*_OPTIONS, *_LISTS)]
    given += [(flag, name, getattr(options, name)) for flag, name, _ in _FLAGS]
    also = [each for each in given if each[2]]
    also += [(flag, f"etcd.{name}", value) for flag, name, value in etcd_options(options)]
    return load(EnclosureDaemonSettings, sources_of(options, also), prefix=ENCLOSURE_PREFIX)


async def _serve(settings: EnclosureDaemonSettings) -> None:
    """Run the enclosure until a signal. Raises what it can't go on for."""
    from ostraca.cli.serve.enclosure.daemon import EnclosureDaemon
    from ostraca.cli.serve.reloading import Reloading
    from ostraca.cli.serve.signals import stop_on_signals
    from ostraca.cli.serve.state_directory import StateDirectory
    from ostraca_fabric.tasks import Tasks

    with StateDirectory(Path(settings.state_dir), f"enclosure {settings.enclosure_id()}") as state:
        daemon = EnclosureDaemon(settings, state)
        files, looking = daemon.secret_files, Tasks("the file of hosts")
        on_hangup = daemon.enclosure.look_now
        if files:
            reloading = Reloading(str(files[0]), files, daemon.reread, look_s=settings.secrets_look_s)
            looking.spawn(reloading.run())
            on_hangup = reloading.look_now
        stop = stop_on_signals(on_hangup)
        try:
            starting = asyncio.ensure_future(_started(daemon))
            if await _first(starting, stop, daemon):
                await _until(stop, daemon, settings)
        finally:
            await looking.stop()
            await daemon.stop()
    log.info("Stopped. %s", "Nothing is exported." if settings.withdraw else "What was exported stays so.")


async def _started(daemon: EnclosureDaemon) -> None:
    await daemon.start()
    await daemon.enclosure.known()


async def _told(stop: asyncio.Event) -> None:
    await stop.wait()


async def _first(starting: asyncio.Future[None], stop: asyncio.Event, daemon: EnclosureDaemon) -> bool:
    """Say whether the enclosure was started before a signal came. Raises what kept it from starting."""
    stopping: asyncio.Future[None] = asyncio.ensure_future(_told(stop))
    await asyncio.wait([starting, stopping, daemon.failed], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    if daemon.failed.done():
        daemon.failed.result()
    if starting.cancelled():
        return False
    starting.result()
    return True


async def _until(stop: asyncio.Event, daemon: EnclosureDaemon, settings: EnclosureDaemonSettings) -> None:
    """Serve pages and tell the service manager, until *stop*. Raises what the daemon can't go on for."""
    from ostraca.cli.serve.notify import Notifier
    from ostraca.cli.up import READY

    notifier = Notifier(os.environ)
    async with AsyncExitStack() as stack:
        if settings.http_listen:
            await stack.enter_async_context(_pages(daemon, settings))
        await stack.enter_async_context(notifier.watched())
        ready = ready_words(daemon)
        print(f"{READY}{ready}", flush=True)
        notifier.ready(ready)
        stopping: asyncio.Future[None] = asyncio.ensure_future(_told(stop))
        await asyncio.wait([stopping, daemon.failed], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        notifier.stopping("it takes its report back")
        if daemon.failed.done():
            daemon.failed.result()
        log.info("Stopping. Another signal leaves at once.")


@asynccontextmanager
async def _pages(daemon: EnclosureDaemon, settings: EnclosureDaemonSettings) -> AsyncIterator[None]:
    from ostraca.cli.http import served_pages
    from ostraca_enclosure.pages import EnclosurePages
    from ostraca_fabric.adapters.http.asked import Asked

    loop, enclosure = asyncio.get_running_loop(), daemon.enclosure
    asked = Asked(enclosure.status, loop, settings.http, time.monotonic, who="the enclosure's daemon")
    async with served_pages(settings.http_listen, EnclosurePages(asked).routes(), settings.http):
        yield


def ready_words(daemon: EnclosureDaemon) -> str:
    """Say what is exported, and where."""
    exported = sum(drive.is_exported for drive in daemon.enclosure.report.drives)
    where = ", ".join(map(str, daemon.target.controllers))
    drives = counted(exported, "drive")
    return f"enclosure {daemon.id} exports {drives} as {daemon.target.nqn} at {where}"
