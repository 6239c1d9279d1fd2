"""Log lines about the inline fallback of NIXL: transport, cause and loss.

Each line is logged once per process: clients reconnect, and a process may have many clients.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ostraca_fabric.wire.address import UnixAddress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.wire.address import Address

log = logging.getLogger("ostraca")

_LOST = "blocks cross {instead}, over the connection, more slowly"
_LINES_MAX = 256

_logged: set[str] = set()


def note_missing(transport: str, error: Exception, *, instead: str) -> None:
    """Log that a transport can't be set up, unless none is left *instead*."""
    if transport != instead:
        _say(logging.WARNING, f"{transport} is not used: {error}; {_LOST.format(instead=instead)}")


def note_refused(address: Address, offered: Sequence[str], chosen: str) -> None:
    """Log that an agent did not take the transport offered first.

    The line is a warning on the agent's own host, where shared memory should work. The line is also a warning
    if a variable of this process may be the cause.
    """
    if not offered or not chosen or chosen == offered[0]:
        return
    from ostraca_fabric.nixl.runtime import foreign_variables  # noqa: PLC0415 (most need none of it)

    others = foreign_variables()
    is_odd = bool(others) or isinstance(address, UnixAddress)
    cause = f", perhaps because of {others}, set for this process" if others else ""
    _say(
        logging.WARNING if is_odd else logging.INFO,
        f"{offered[0]} is not used with {address}: the agent lacks this transport, or can't reach this "
        f"process over it{cause}; see the agent's log; {_LOST.format(instead=chosen)}",
    )


def _say(level: int, line: str) -> None:
    if line not in _logged and len(_logged) < _LINES_MAX:
        _logged.add(line)
        log.log(level, "%s", line)
