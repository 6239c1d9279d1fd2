"""``ostraca serve admin``: the admin service, until SIGTERM.

Exactly one line goes to stdout, when it is ready. Logs go to stderr. Any number of these may serve a fabric:
what one leaves under way, another goes on with.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.cli.admin.options import TOKEN_VARIABLE, URL_VARIABLE
from ostraca.cli.etcd_place import add_etcd_options, etcd_options
from ostraca.cli.logs import add_log_options, log_to_stderr
from ostraca.cli.settings import add_settings_options, as_toml, load, sources_of
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from ostraca.cli.serve.admin import AdminDaemon
    from ostraca.cli.serve.admin_settings import AdminSettings

log = logging.getLogger(__name__)

ADMIN_PREFIX = "OSTRACA_ADMIN_"
"""What the environment variables that set its settings begin with."""

_OF_CLIENTS = (URL_VARIABLE, TOKEN_VARIABLE)
"""Those that commands read which ask this service: who works with it has them set."""

_OPTIONS = (
    ("--id", "id", "NAME", "what it is called in logs (default: as the machine is)"),
    ("--listen", "listen", "HOST:PORT", "where the REST API is (default: 127.0.0.1:7480)"),
    ("--fabric", "fabric", "ID", "refuse any other fabric than this"),
    ("--tokens", "tokens_file", "FILE", "the agents' file of tokens"),
    ("--people", "people_file", "FILE", "who may ask for what: bearer tokens by role"),
)


def add_admin(daemons: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Let the user start an admin service."""
    parser = daemons.add_parser(
        "admin",
        help="run an admin service: enclosures, and the fabric, over REST",
        description=(
            "Run an admin service of a fabric that etcd keeps, until SIGTERM: a REST API, with its OpenAPI\n"
            "at /docs. It keeps everything in etcd; run as many as you like. It takes\n"
            "pip install 'ostraca[admin]'.\n"
            "Options win over the environment (OSTRACA_ADMIN_...), and that over the settings file."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag, name, metavar, meaning in _OPTIONS:
        parser.add_argument(flag, dest=name, metavar=metavar, help=meaning)
    add_etcd_options(parser)
    add_settings_options(parser)
    add_log_options(parser)
    parser.set_defaults(serve=_run_admin)


def _run_admin(options: argparse.Namespace) -> int:
    from ostraca.cli.serve.admin_settings import AdminSettings

    given = [(flag, name, getattr(options, name)) for flag, name, _, _ in _OPTIONS]
    also = [each for each in given if each[2]]
    also += [(flag, f"etcd.{name}", value) for flag, name, value in etcd_options(options)]
    sources = sources_of(options, also)
    known = {name: value for name, value in os.environ.items() if name not in _OF_CLIENTS}
    loaded = load(AdminSettings, replace(sources, environment=known), prefix=ADMIN_PREFIX)
    if options.print_settings:
        print(as_toml(loaded.settings, loaded.origins), end="")
        return 0
    from ostraca.cli.serve.store import check_place

    log_to_stderr(options, is_daemon=True)
    check_place(loaded.settings.etcd)
    try:
        from ostraca.cli.serve.admin import AdminDaemon
    except ImportError as error:
        message = (
            f"the admin service takes more than is installed ({error.name}): pip install 'ostraca[admin]'"
        )
        raise UsageError(message) from error
    with asyncio.Runner() as runner:
        runner.run(_serve(AdminDaemon(loaded.settings), loaded.settings))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)  # not through the interpreter's shutdown: threads of grpc still run


async def _serve(daemon: AdminDaemon, settings: AdminSettings) -> None:
    """Run the service until a signal."""
    from ostraca.cli.serve.notify import Notifier
    from ostraca.cli.serve.reloading import Reloading
    from ostraca.cli.serve.signals import started, stop_on_signals
    from ostraca.cli.up import READY
    from ostraca_fabric.tasks import Tasks

    files, looking, notifier = daemon.secret_files, Tasks("files of secrets"), Notifier(os.environ)
    reloading = Reloading(", ".join(map(str, files)), files, daemon.reread, look_s=settings.secrets_look_s)
    stop = stop_on_signals(reloading.look_now)
    try:
        async with notifier.busy(lambda: "It begins to serve, or waits for etcd to find the fabric."):
            is_up = await started(daemon.start(), stop)
        if is_up:
            async with AsyncExitStack() as stack:
                stack.push_async_callback(looking.stop)
                looking.spawn(reloading.run())
                await stack.enter_async_context(notifier.watched())
                print(f"{READY}{daemon.url}/docs  # admin {daemon.name}", flush=True)
                notifier.ready(daemon.url)
                await stop.wait()
                notifier.stopping("what is under way is answered")
    finally:
        await daemon.stop()
    log.info("Stopped.")
