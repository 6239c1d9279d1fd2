"""Small fabric in the calling process, for tests of connectors and applications.

    with FabricThread(small_plan(tmp_path)) as fabric, ostraca.connect(fabric.addresses) as client:
        ...

The parts equal a pod: agents, shard owners, drives on files, sockets. Only etcd and the network are missing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from ostraca_cli.composition.embedded import EmbeddedFabric, FabricPlan
from ostraca_cli.composition.transports import loop_factory
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.transport import Transport
from ostraca_fabric.telemetry.status import AgentStatus

_MIB = 1 << 20
_TIMEOUT_S = 30


def small_plan(directory: Path) -> FabricPlan:
    """Describe a fabric that starts fast: 2 drives of 4 segments, no DRAM cache, blocks over sockets."""
    return FabricPlan(
        directory=directory,
        capacity_bytes=2 * (4 * 64 + 1) * _MIB,
        dram_bytes=0,
        staging_bytes=64 * _MIB,
        transports=("inline",),
    )


class FabricThread:
    """Fabric on an event loop of its own in this process.

    A context manager. After ``stop`` the fabric can be started again, with all blocks.
    """

    def __init__(
        self,
        plan: FabricPlan,
        *,
        wrap: Callable[[Transport], Transport] | None = None,
        wrap_drive: Callable[[Drive], Drive] | None = None,
    ) -> None:
        """Store the plan; *wrap* and *wrap_drive* may inject faults into each transport and drive."""
        self.plan = plan
        self._wrap = wrap
        self._wrap_drive = wrap_drive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.fabric: EmbeddedFabric | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses for workers."""
        assert self.fabric is not None, "start comes first"
        return self.fabric.addresses

    def status(self) -> tuple[AgentStatus, ...]:
        """Return the status of each agent."""
        assert self.fabric is not None, "start comes first"
        return self.fabric.status()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the fabric's loop, before it stops."""
        assert self._loop is not None, "start comes first"
        self._loop.call_soon_threadsafe(function)

    def start(self) -> Self:
        """Start the fabric. Raises an OstracaError with advice."""
        loop = self._loop = loop_factory()()
        self._thread = threading.Thread(target=loop.run_forever, name="fabric")
        self._thread.start()
        self.fabric = EmbeddedFabric(self.plan, wrap=self._wrap, wrap_drive=self._wrap_drive)
        try:
            asyncio.run_coroutine_threadsafe(self.fabric.start(), loop).result(_TIMEOUT_S)
        except BaseException:
            self._end_loop()
            raise
        return self

    def stop(self) -> None:
        """Stop the fabric, if running. Close clients first."""
        if self._loop is None or self.fabric is None:
            return
        try:
            has_ended = asyncio.run_coroutine_threadsafe(self.fabric.stop(), self._loop).result(_TIMEOUT_S)
        finally:  # otherwise a failed test would keep its process from ending
            self._end_loop()
        assert has_ended, "work was left over"

    def _end_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        self._loop = None

    def __enter__(self) -> Self:
        """Start the fabric."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop the fabric."""
        self.stop()
