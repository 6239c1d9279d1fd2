"""Connecting to another agent while a session goes on with the first, over ends of the arena of its own."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ostraca.dial import dial
from ostraca_fabric.errors import ConnectError, ProtocolError, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca.arena import Arena
    from ostraca.dial import Caller, Dialled
    from ostraca.session import Session
    from ostraca_fabric.ports.transport import ArenaEnd
    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")


def dialled_elsewhere(
    addresses: Sequence[Address],
    known: Sequence[Session],
    caller: Caller,
    arena: Arena,
    spare: dict[str, ArenaEnd],
    *,
    within_s: float,
) -> Dialled | None:
    """Connect to an agent at one of these addresses, in order, that none of the *known* sessions is with;
    return None when there is no such agent now, or when an end broke.

    It is offered the ends in *spare*, which are made if there are none. All addresses share *within_s*.
    """
    addresses = [each for each in addresses if all(each != session.address for session in known)]
    try:
        if addresses and not spare:
            spare.update(arena.successors())
    except TransportError as error:
        log.debug("no end can be offered to another agent: %s", error)
        return None
    caller = replace(caller, ends=spare)
    for address in addresses:
        until_s = time.monotonic() + within_s / len(addresses)
        try:
            dialled = dial([address], caller, until_s=until_s)
        except (ConnectError, ProtocolError) as error:
            log.debug("%s does not take over: %s", address, error)
            continue
        except TransportError as error:
            log.debug("an end broke that was offered to another agent: %s", error)
            cut_off(spare)
            return None
        if all(dialled.welcome.start_id != session.start_id for session in known):
            return dialled
        dialled.line.close()  # another address of one that is known
    return None


def cut_off(spare: dict[str, ArenaEnd]) -> None:
    """Offer these to nobody any more, and leave none there."""
    while spare:
        _, end = spare.popitem()
        with suppress(TransportError):  # whoever was offered it was asked for nothing, so nothing lands
            end.cut_off()
