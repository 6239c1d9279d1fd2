"""Reservations of NVMe namespaces, by Linux's NVMe host.

Commands are passed through to the namespace (``nvme_request``). Linux's own calls (``linux/pr.h``) are
unsuitable for three reasons. They ask each target to keep registrations through a power loss, and not all
targets can. Some releases report a conflict as an I/O error. The first key of ``struct pr_preempt``, the
old key, is the caller's own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ostraca_dpu_agent.adapters.nvme_of.kernel import ASK_S, ask_kernel
from ostraca_fabric.ports.reservations import ReservationCommand, ReservationReport

Ask = Callable[..., Awaitable[dict[str, Any]]]


class NvmeReservations:
    """Linux implementation of ``ports.reservations.Reservations``."""

    def __init__(self, ask_s: float = ASK_S, ask: Ask = ask_kernel) -> None:
        """Query the kernel through *ask*, for up to *ask_s* per query."""
        self._ask_s = ask_s
        self._ask = ask

    async def reports(self, devices: Sequence[str]) -> Mapping[str, ReservationReport | None]:
        """Return reports as ``Reservations`` specifies, by one process for all."""
        answer = await self._ask(self._ask_s, do="reports", devices="\n".join(devices))
        return {
            device: None if said is None else ReservationReport(said["type"], frozenset(said["keys"]))
            for device, said in zip(devices, answer["reports"], strict=True)
            if said is None or "errno" not in said
        }

    async def act(self, device: str, act: ReservationCommand, key: int, other: int = 0) -> bool:
        """Act as ``Reservations`` specifies."""
        answer = await self._ask(
            self._ask_s, do="reserve", device=device, act=act.value, key=str(key), other=str(other)
        )
        return bool(answer["is_done"])
