"""Hints: what is told to the agent in reach and not answered. Nobody waits, and nothing is lost with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca.core.checks import check_batch, checked_chains
from ostraca.core.plan import blocks_per_request, windows
from ostraca_fabric.wire.messages import EndSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca.client import Client
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain


def tell_session_ended(client: Client, volume: Volume, chains: Chain | Sequence[Chain]) -> None:
    """Say what ``Volume.end_session`` says. Raises UsageError and ClosedError."""
    listed = checked_chains(chains, hash_bytes=volume.layout.hash_bytes)
    check_batch(sum(map(len, listed)), blocks_max=volume.settings.batch_blocks_max)
    with client.running():
        session = client.reach.live
        handle = None if session is None else session.handles.get(volume.key)
        if session is None or handle is None:
            return
        blocks_max = blocks_per_request(session.limits, volume.layout.hash_bytes)
        for window in windows(listed, blocks_max):
            session.tell(EndSession(handle, tuple(chain.span() for chain in window.chains)))
