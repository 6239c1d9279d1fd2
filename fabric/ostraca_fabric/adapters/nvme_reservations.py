"""Reservations of NVMe namespaces, by Linux's own host.

Commands are passed through to the namespace (``nvme_request``). Linux's own calls for it (``linux/pr.h``) ask
each target to keep registrations through a power loss, which not all do, and took a conflict for an I/O error
in some releases; and the first key of their ``struct pr_preempt``, the old one, is that of who asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ostraca_fabric.adapters.nvme_kernel import asked
from ostraca_fabric.adapters.nvme_timeouts import ASK_S
from ostraca_fabric.ports.reservations import Act, Report

Ask = Callable[..., Awaitable[dict[str, Any]]]


class NvmeReservations:
    """Implements ``ports.reservations.Reservations``."""

    def __init__(self, ask_s: float = ASK_S, ask: Ask = asked) -> None:
        """A question may take *ask_s*; *ask* puts it to the kernel."""
        self._ask_s = ask_s
        self._ask = ask

    async def reports(self, devices: Sequence[str]) -> Mapping[str, Report | None]:
        """See ``Reservations``. All of them are asked by one process."""
        answer = await self._ask(self._ask_s, do="reports", devices="\n".join(devices))
        return {
            device: None if said is None else Report(said["type"], frozenset(said["keys"]))
            for device, said in zip(devices, answer["reports"], strict=True)
            if said is None or "errno" not in said
        }

    async def act(self, device: str, act: Act, key: int, other: int = 0) -> bool:
        """See ``Reservations``."""
        answer = await self._ask(
            self._ask_s, do="reserve", device=device, act=act.value, key=str(key), other=str(other)
        )
        return bool(answer["is_done"])
