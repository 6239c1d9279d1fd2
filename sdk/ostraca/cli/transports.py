"""What moves blocks between a process's agents and their workers, and the loop that they run on."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.inline_transport import InlineTransport
from ostraca_fabric.adapters.nixl_transport import NixlTransport
from ostraca_fabric.errors import TransportError, UsageError

if TYPE_CHECKING:
    from ostraca_fabric.ports.transport import Transport

log = logging.getLogger(__name__)


def made_transports(names: tuple[str, ...]) -> dict[str, Transport]:
    """Make the transports that work here, in order of preference: one that this machine lacks is left out,
    unless it is the only one.

    Raises UsageError for a name that is none, and TransportError.
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
                log.info("NIXL is not used: %s", error)
        else:
            message = f"{name!r} is no transport: take nixl or inline"
            raise UsageError(message)
    return made


def loop_factory() -> type[asyncio.AbstractEventLoop]:
    """Return the fastest loop there is here."""
    try:
        from uvloop import Loop
    except ModuleNotFoundError:
        return asyncio.SelectorEventLoop
    return Loop
