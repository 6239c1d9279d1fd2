"""``--http``: a daemon's pages over HTTP, beside what its command does."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from ostraca_fabric.adapters.http.app import Page
    from ostraca_fabric.adapters.http.settings import HttpSettings
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.address import TcpAddress

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:9464"


def add_http_option(parser: argparse.ArgumentParser) -> None:
    """Let the user ask for pages, for ``http_pages``."""
    parser.add_argument(
        "--http",
        nargs="?",
        type=_http_argument,
        const=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"serve /metrics, /healthz, /readyz and /status over HTTP, at {DEFAULT_ADDRESS} unless told "
        "otherwise. Whoever reaches it may read them: listen on networks you trust",
    )


@asynccontextmanager
async def http_pages(
    where: str | None, looks: Mapping[str, Callable[[], AgentStatus]], settings: HttpSettings
) -> AsyncIterator[str]:
    """Serve pages meanwhile, and yield their URL; nothing, and an empty one, where they were not asked for.

    *looks* are called on the running loop. Raises ConnectError when the address can't be had.
    """
    if where is None:
        yield ""
        return
    from ostraca_dpu_agent.pages import AgentPages, routes_of

    loop = asyncio.get_running_loop()
    agents = {agent: AgentPages(look, loop, settings, time.monotonic) for agent, look in looks.items()}
    async with served_pages(where, routes_of(agents), settings) as url:
        yield url


@asynccontextmanager
async def served_pages(
    where: str, routes: Mapping[str, Callable[[], Awaitable[Page]]], settings: HttpSettings
) -> AsyncIterator[str]:
    """Serve these pages meanwhile, and yield their URL. Raises ConnectError when the address can't be had."""
    from ostraca_fabric.adapters.http.app import Pages
    from ostraca_fabric.adapters.http.server import HttpServer
    from ostraca_fabric.wire.address import is_loopback

    address = http_address(where)
    server = HttpServer(Pages(routes), address, settings)
    server.start()
    log.info("Pages are at %s: %s", server.url, " ".join(routes))
    if not is_loopback(address.host):
        log.warning("HTTP listens at %s, and asks nobody who they are: keep strangers away", address.host)
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


def http_address(text: str) -> TcpAddress:
    """Read where pages are to be. Raises UsageError that says how that is written."""
    from ostraca_fabric.wire.address import TcpAddress, parse_address

    try:
        address = parse_address(f"tcp://{text}")
    except UsageError as error:
        message = f"{text!r} is no place for HTTP: write host:port, as in {DEFAULT_ADDRESS}"
        raise UsageError(message) from error
    assert isinstance(address, TcpAddress)
    return address
