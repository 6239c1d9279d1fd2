"""What this host's kernel is still connecting, after who asked for it gave up.

Linux makes one controller after the other, and nothing ends that: no signal, and ``delete_controller`` is
refused until a controller has been there. Where an enclosure refuses a secret, it may end the connection
before its answer was seen; over RDMA the host then sends the same again, to nobody, for six times
``nvme_core.admin_timeout``. Meanwhile it can be seen how far the controller came, and others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostraca_fabric.adapters.nvme_refusals import Late
from ostraca_fabric.adapters.nvme_sysfs import leads_to
from ostraca_fabric.ports.paths import PathError

if TYPE_CHECKING:
    from ostraca_fabric.adapters.nvme_sysfs import Connecting, NvmeSysfs
    from ostraca_fabric.target import Controller


@dataclass(frozen=True, slots=True)
class Asked:
    """What a controller was asked for with."""

    nqn: str
    controller: Controller
    addresses: tuple[str, ...]
    host: str
    secret: str = field(repr=False)


class LateControllers:
    """Those of one host. It reads ``/sys``, so call it on a thread."""

    def __init__(self, sysfs: NvmeSysfs) -> None:
        """Look there."""
        self._sysfs = sysfs
        self._told: dict[str, tuple[Asked, PathError]] = {}
        """By the name of one that was given up: what was told of it."""

    def seen(self, asked: Asked, others: frozenset[str]) -> Late:
        """Say how far one came that was just given up; *others* were there before it was asked for."""
        under_way = self._under_way()
        behind = [each.name for each in under_way if each.name in others]
        own = [each for each in under_way if each.name not in others and _is_of(each, asked)]
        return Late(
            name=own[0].name if own else "",
            has_answered=any(each.has_answered for each in own),
            behind=behind[0] if behind else "",
            behind_s=self._sysfs.refused_s(),
        )

    def remember(self, late: Late, asked: Asked, error: PathError) -> None:
        """Tell the same again for as long as the kernel is at it."""
        if late.name and late.has_answered:
            self._told[late.name] = asked, error

    def told(self, asked: Asked) -> PathError | None:
        """Return what to tell of a controller that was given up and is asked for again, with the same secret,
        while the kernel is still at it: nothing else can come of that.
        """
        under_way = {each.name: each for each in self._under_way()}
        for name, (before, error) in list(self._told.items()):
            if name not in under_way:
                self._told.pop(name, None)
            elif before == asked and _is_of(under_way[name], asked):
                return PathError(error.stage, str(error))
        return None

    def _under_way(self) -> list[Connecting]:
        return [each for each in self._sysfs.connecting() if not each.has_been]


def _is_of(found: Connecting, asked: Asked) -> bool:
    return found.host == asked.host and leads_to(found, asked.controller, asked.addresses)
