"""Flash I/O engine of an event loop: the loop takes ends."""

from __future__ import annotations

import asyncio

from ostraca_fabric.drives.io_engine import FlashIoSettings, IoEngine


class LoopIoEngine(IoEngine):
    """Engine for one event loop at a time. Submit on the loop."""

    def __init__(self, settings: FlashIoSettings | None = None) -> None:
        """Start the engine's threads. Raises DriveError if the process can start no thread."""
        super().__init__(settings)
        self._loop: asyncio.AbstractEventLoop | None = None

    def close(self) -> None:
        """Wait for all I/O and stop the threads. Call on the event loop, or after its end."""
        self._release_loop()
        super().close()

    def _prepare_taking(self) -> None:
        """Have the running loop take ends, in place of an earlier loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._release_loop()
        self._loop = loop
        loop.add_reader(self.descriptor, self.take)

    def _release_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.descriptor)
