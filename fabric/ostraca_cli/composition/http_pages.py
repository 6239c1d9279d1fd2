"""HTTP pages of a daemon, for ``--http``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ostraca_cli.command import option
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from ostraca_fabric.telemetry.http.app import HttpPage, HttpSettings
    from ostraca_fabric.telemetry.status import AgentStatus
    from ostraca_fabric.wire.address import TcpAddress

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:9464"


@asynccontextmanager
async def serve_agent_pages(
    where: str | None, statuses: Mapping[str, Callable[[], AgentStatus]], settings: HttpSettings
) -> AsyncIterator[str]:
    """Serve the pages of agents meanwhile, and yield their URL.

    With *where* None, serves nothing and yields an empty URL. The running loop calls *statuses*. Raises
    ConnectError if the address is unavailable.
    """
    if where is None:
        yield ""
        return
    from ostraca_fabric.telemetry.http.status_pages import StatusPages, process_routes
    from ostraca_fabric.telemetry.metrics import AGENT_METRICS

    loop = asyncio.get_running_loop()
    agents = {
        agent: StatusPages("the agent", status, AGENT_METRICS, settings, time.monotonic, loop=loop).routes()
        for agent, status in statuses.items()
    }
    async with serve_pages(where, process_routes(agents), settings) as url:
        yield url


@asynccontextmanager
async def serve_pages(
    where: str, routes: Mapping[str, Callable[[], Awaitable[HttpPage]]], settings: HttpSettings
) -> AsyncIterator[str]:
    """Serve *routes* meanwhile, and yield the URL.

    Raises ConnectError if the address is unavailable.
    """
    from ostraca_fabric.telemetry.http.app import Pages
    from ostraca_fabric.telemetry.http.server import HttpServer
    from ostraca_fabric.wire.address import is_loopback

    address = http_address(where)
    server = HttpServer(Pages(routes), address, settings)
    server.start()
    log.info("Pages are at %s: %s", server.url, " ".join(routes))
    if not is_loopback(address.host):
        log.warning("HTTP pages at %s need no credentials: restrict access to trusted networks", address.host)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


def _http_argument(text: str) -> str:
    try:
        http_address(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


HTTP = option(
    "--http",
    nargs="?",
    type=_http_argument,
    const=DEFAULT_ADDRESS,
    metavar="HOST:PORT",
    help=(
        "serve /metrics, /healthz, /readyz and /status over HTTP, by default at "
        f"{DEFAULT_ADDRESS}. The pages need no credentials: listen only on trusted networks"
    ),
)
"""Option for HTTP pages, for ``serve_agent_pages``."""


def http_address(text: str) -> TcpAddress:
    """Parse an address for pages; raises UsageError with the correct form."""
    from ostraca_fabric.wire.address import TcpAddress, parse_address

    try:
        address = parse_address(f"tcp://{text}")
    except UsageError as error:
        raise UsageError(
            f"{text!r} is no address for HTTP: write host:port, as in {DEFAULT_ADDRESS}"
        ) from error
    assert isinstance(address, TcpAddress)
    return address
