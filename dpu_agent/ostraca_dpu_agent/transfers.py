"""What is under way between the agent and one worker's arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from ostraca_fabric.ports.transport import Direction, Peer, TransferEnd, Wave


class CountedPeer:
    """A worker's arena that knows its transfers: implements ``ports.transport.Peer`` around another."""

    def __init__(self, peer: Peer) -> None:
        """Count from here on."""
        self._peer = peer
        self._under_way: set[asyncio.Future[TransferEnd]] = set()

    @property
    def under_way(self) -> frozenset[asyncio.Future[TransferEnd]]:
        """Transfers not known to have ended. After ``close`` no others begin."""
        return frozenset(self._under_way)

    def submit(self, direction: Direction, wave: Wave) -> asyncio.Future[TransferEnd]:
        """As in the port."""
        end = self._peer.submit(direction, wave)
        if not end.done():
            self._under_way.add(end)
            end.add_done_callback(self._under_way.discard)
        return end

    def close(self) -> None:
        """As in the port."""
        self._peer.close()
