"""``ostraca serve admin``: run the admin service until SIGTERM.

The only line on stdout appears when the service is ready. Logs go to stderr. Any number of services may serve
a fabric; another service continues the unfinished operations of a stopped service.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from ostraca_cli.commands.serve.daemon_options import DaemonOption, daemon_action, exit_process, load_settings
from ostraca_cli.commands.serve.notify import Notifier
from ostraca_cli.commands.serve.reload import FileReloader
from ostraca_cli.commands.serve.signals import start_or_stop, stop_on_signals
from ostraca_cli.composition.process_limits import check_client_of_etcd
from ostraca_cli.terminal.logs import log_to_stderr
from ostraca_cli.terminal.streams import READY, announce, unblock
from ostraca_fabric.errors import UsageError
from ostraca_fabric.sockets.default_paths import ADMIN_TOKEN_VARIABLE, ADMIN_URL_VARIABLE

if TYPE_CHECKING:
    import argparse

    from ostraca_cli.commands.serve.admin import AdminDaemon
    from ostraca_cli.commands.serve.admin_settings import AdminSettings

log = logging.getLogger(__name__)

ADMIN_PREFIX = "OSTRACA_ADMIN_"
"""Prefix of the environment variables for the service's settings."""

_CLIENT_VARIABLES = (ADMIN_URL_VARIABLE, ADMIN_TOKEN_VARIABLE)
"""Variables of the commands that query the service; set for operators, and no settings of the service."""

_OPTIONS = (
    DaemonOption("--id", "id", "NAME", "name of the service in logs (default: host name)"),
    DaemonOption("--listen", "listen", "HOST:PORT", "address of the REST API (default: 127.0.0.1:7480)"),
    DaemonOption("--fabric", "fabric", "ID", "refuse any other fabric"),
    DaemonOption("--tokens", "tokens_file", "FILE", "the agents' file of tokens"),
    DaemonOption("--people", "people_file", "FILE", "bearer tokens of people and programs, by role"),
)


def _run(options: argparse.Namespace) -> int:
    from ostraca_cli.commands.serve.admin_settings import AdminSettings

    settings = load_settings(options, _OPTIONS, AdminSettings, prefix=ADMIN_PREFIX, ignored=_CLIENT_VARIABLES)
    if settings is None:
        return 0
    from ostraca_cli.commands.serve.store import check_place

    log_to_stderr(options, is_daemon=True)
    check_place(settings.etcd)
    check_client_of_etcd("an admin service")
    try:
        from ostraca_cli.commands.serve.admin import AdminDaemon
    except ImportError as error:
        raise UsageError(
            f"the admin service needs {error.name}, which is not installed: pip install 'ostraca[admin]'"
        ) from error
    with asyncio.Runner() as runner:
        runner.run(_serve(AdminDaemon(settings), settings))
        return exit_process(0)


async def _serve(daemon: AdminDaemon, settings: AdminSettings) -> None:
    """Run the service until a signal."""
    unblock()
    notifier = Notifier(os.environ)
    reloader = FileReloader(daemon.secret_files, daemon.reread, look_s=settings.secrets_check_s)
    stop = stop_on_signals(reloader.look_now)
    try:
        async with notifier.busy(lambda: "Starting to serve, or waiting for etcd to find the fabric."):
            is_up = await start_or_stop(daemon.start(), stop)
        if is_up:
            async with reloader.running(), notifier.watched():
                announce(f"{READY}{daemon.url}  # admin {daemon.name}")
                notifier.ready(daemon.url)
                await stop.wait()
                notifier.stopping("answering open requests")
    finally:
        await daemon.stop()
    log.info("Stopped.")


ADMIN = daemon_action(
    "admin",
    _run,
    _OPTIONS,
    summary="run an admin service: REST API of a fabric",
    description=(
        "Run an admin service of a fabric in etcd, until SIGTERM: a REST API, with its OpenAPI at\n"
        "/v1/openapi.json. All state is in etcd, so any number of services may run. Requires\n"
        "pip install 'ostraca[admin]'. Precedence: options, environment (OSTRACA_ADMIN_...), settings\n"
        "file."
    ),
)
"""``admin`` among the daemons of ``ostraca serve``."""
