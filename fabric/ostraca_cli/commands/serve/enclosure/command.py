"""``ostraca serve enclosure``: options and life of the process.

The only line on stdout appears when drives are exported. Logs go to stderr. The first Ctrl-C or SIGTERM ends
the daemon in order; exports stay for hosts and for the next start. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.commands.serve.daemon_options import DaemonOption, daemon_action, exit_process, load_settings
from ostraca_cli.commands.serve.notify import Notifier
from ostraca_cli.commands.serve.reload import FileReloader
from ostraca_cli.commands.serve.signals import first_of, start_or_stop, stop_on_signals
from ostraca_cli.composition.process_limits import check_client_of_etcd
from ostraca_cli.terminal.logs import log_to_stderr
from ostraca_cli.terminal.streams import READY, announce, unblock
from ostraca_fabric.runtime.sentences import counted

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from ostraca_cli.commands.serve.enclosure.daemon import EnclosureDaemon
    from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings

log = logging.getLogger(__name__)

ENCLOSURE_PREFIX = "OSTRACA_ENCLOSURE_"
"""Prefix of the environment variables for an enclosure's settings."""

_OPTIONS = (
    DaemonOption("--id", "id", "NAME", "name of the enclosure in the fabric (default: host name)"),
    DaemonOption("--nqn", "nqn", "NQN", "NQN of the subsystem (default: derived from the id)"),
    DaemonOption("--files", "files", "DIR", "use files in this directory as drives, not NVMe drives"),
    DaemonOption("--target", "target", "NAME", "nvmet (default), or userspace for files without nvmet"),
    DaemonOption("--drives", "file_drives", "N", "number of files; missing files are created"),
    DaemonOption("--drive-size", "file_drive_bytes", "SIZE", "size of created files (default: 1GiB)"),
    DaemonOption("--hosts", "hosts_file", "FILE", "admitted hosts, with their secrets (default: every host)"),
    DaemonOption("--state-dir", "state_dir", "DIR", "state directory of this daemon alone"),
    DaemonOption("--fabric", "fabric", "ID", "refuse any other fabric"),
    DaemonOption("--http", "http_listen", "HOST:PORT", "serve /metrics, /healthz, /readyz and /status there"),
    DaemonOption(
        "--listen",
        "listen",
        "CONTROLLER",
        "rdma://ADDRESS:PORT, tcp://ADDRESS:PORT or files:///DIR (may be repeated, preferred first)",
        is_list=True,
    ),
    DaemonOption(
        "--drive",
        "drives",
        "NAME",
        "export this drive: name, device, NGUID or serial number (may be repeated; default: all fit drives)",
        is_list=True,
    ),
    DaemonOption("--force", "force", "", "export unfit drives too, for laboratories"),
    DaemonOption("--withdraw", "withdraw", "", "end all exports at the end of the daemon"),
)


def _run(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings

    settings = load_settings(options, _OPTIONS, EnclosureDaemonSettings, prefix=ENCLOSURE_PREFIX)
    if settings is None:
        return 0
    from ostraca_cli.commands.serve.store import check_place

    settings.export_target()
    log_to_stderr(options, is_daemon=True)
    check_place(settings.etcd)
    check_client_of_etcd("an enclosure daemon")
    asyncio.run(_serve(settings))
    return exit_process(0)


async def _serve(settings: EnclosureDaemonSettings) -> None:
    """Run the enclosure until a signal; raises fatal errors."""
    from ostraca_cli.commands.serve.enclosure.daemon import EnclosureDaemon
    from ostraca_cli.commands.serve.enclosure.settings import USERSPACE
    from ostraca_cli.commands.serve.state_directory import StateDirectory

    unblock()
    with StateDirectory(Path(settings.state_dir), f"enclosure {settings.enclosure_id()}") as state:
        daemon = EnclosureDaemon(settings, state)
        reloader = FileReloader(daemon.secret_files, daemon.reread, look_s=settings.secrets_check_s)
        stop = stop_on_signals(reloader.look_now)
        notifier = Notifier(os.environ)
        try:
            async with reloader.running():
                async with notifier.busy(
                    lambda: "Starting to export, or waiting for etcd to join the fabric."
                ):
                    is_up = await start_or_stop(_start(daemon), stop, daemon.failed)
                if is_up:
                    await _until(stop, daemon, settings, notifier)
        finally:
            await daemon.stop()
    has_ended = settings.withdraw or settings.target == USERSPACE
    log.info("Stopped. %s", "All exports have ended." if has_ended else "All exports stay.")


async def _start(daemon: EnclosureDaemon) -> None:
    await daemon.start()
    await daemon.enclosure.wait_until_known()


async def _until(
    stop: asyncio.Event, daemon: EnclosureDaemon, settings: EnclosureDaemonSettings, notifier: Notifier
) -> None:
    """Serve pages and notify the service manager, until *stop*; raises fatal errors of the daemon."""
    async with AsyncExitStack() as stack:
        if settings.http_listen:
            await stack.enter_async_context(_pages(daemon, settings))
        await stack.enter_async_context(notifier.watched())
        ready = ready_words(daemon)
        announce(f"{READY}{ready}")
        notifier.ready(ready)
        await first_of(stop, daemon.failed)
        notifier.stopping("withdrawing the report")
        if daemon.failed.done():
            daemon.failed.result()
        log.info("Stopping. Another signal exits at once.")


@asynccontextmanager
async def _pages(daemon: EnclosureDaemon, settings: EnclosureDaemonSettings) -> AsyncIterator[None]:
    from ostraca_cli.composition.http_pages import serve_pages
    from ostraca_fabric.telemetry.enclosure_metrics import ENCLOSURE_METRICS
    from ostraca_fabric.telemetry.http.status_pages import StatusPages

    pages = StatusPages(
        "the enclosure's daemon",
        daemon.enclosure.status,
        ENCLOSURE_METRICS,
        settings.http,
        time.monotonic,
        loop=asyncio.get_running_loop(),
    )
    async with serve_pages(settings.http_listen, pages.routes(), settings.http):
        yield


def ready_words(daemon: EnclosureDaemon) -> str:
    """Return the number of exported drives and their address."""
    exported = sum(drive.is_exported for drive in daemon.enclosure.report.drives)
    where = ", ".join(map(str, daemon.target.controllers))
    drives = counted(exported, "drive")
    return f"enclosure {daemon.id} exports {drives} as {daemon.target.nqn} at {where}"


ENCLOSURE = daemon_action(
    "enclosure",
    _run,
    _OPTIONS,
    summary="export this machine's drives",
    description=(
        "Export the drives of an enclosure over NVMe-oF or as files, and report their health, until\n"
        "SIGTERM. Exports stay after the end of the daemon, and without etcd. Precedence: options,\n"
        "environment (OSTRACA_ENCLOSURE_...), settings file. Reference:\n"
        "docs/reference/enclosure-settings.md."
    ),
    epilog=(
        "example:\n"
        "  $ ostraca serve enclosure --id shelf-1 --listen rdma://10.0.8.1:4420 --hosts "
        "/etc/ostraca/hosts.toml \\\n"
        "      --etcd etcd-0:2379\n"
        "  ready: enclosure shelf-1 exports 24 drives as nqn.2025-01.io.ostraca:shelf-1 at "
        "rdma://10.0.8.1:4420\n"
    ),
)
"""``enclosure`` among the daemons of ``ostraca serve``."""
