"""Transports of a process's agents, and the event loop."""

from __future__ import annotations

import asyncio
import logging

from ostraca_dpu_agent.adapters.transports.inline_transport import InlineTransport
from ostraca_dpu_agent.adapters.transports.nixl_transport import NixlTransport
from ostraca_fabric.errors import NotInstalledError, TransportError, UsageError
from ostraca_fabric.ports.transport import Transport

log = logging.getLogger(__name__)


def create_transports(names: tuple[str, ...]) -> dict[str, Transport]:
    """Create the working transports of *names*, preferred first.

    Skips transports missing on this machine, except for a sole name. Raises UsageError for an unknown name,
    and TransportError.
    """
    made: dict[str, Transport] = {}
    for name in names:
        if name == InlineTransport.name:
            made[name] = InlineTransport()
        elif name == NixlTransport.name:
            try:
                made[name] = NixlTransport.create("ostraca")
            except TransportError as error:
                if names == (NixlTransport.name,):
                    raise
                level = logging.INFO if isinstance(error, NotInstalledError) else logging.WARNING
                log.log(level, "NIXL is unavailable; blocks use the slower inline transport: %s", error)
        else:
            raise UsageError(f"{name!r} is no transport: take nixl or inline")
    return made


def loop_factory() -> type[asyncio.AbstractEventLoop]:
    """Return the fastest available event loop."""
    try:
        from uvloop import Loop
    except ModuleNotFoundError:
        return asyncio.SelectorEventLoop
    except ImportError as error:
        log.warning("uvloop is unavailable; requests use the slower asyncio loop: %s", error)
        return asyncio.SelectorEventLoop
    return Loop
