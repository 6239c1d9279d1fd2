"""What may be set of the user-space initiator, and what would break the bound of late writes."""

from __future__ import annotations

from typing import Any

import pytest

from ostraca_dpu_agent.settings import AgentSettings, NvmeSettings, OwnerSettings
from ostraca_fabric.errors import UsageError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"initiator": "spdk"}, "set it to kernel or userspace"),
        ({"initiator": "userspace", "reservations": True}, "needs the kernel's initiator"),
        ({"initiator": "userspace", "io_timeout_s": 0.0}, "io_timeout_s of nvme above 0"),
    ],
)
def test_what_can_not_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        NvmeSettings(**given)


@pytest.mark.parametrize(("io_timeout_s", "is_fit"), [(50.0, True), (50.5, False)])
def test_a_write_may_not_land_after_late_write_s(io_timeout_s: float, *, is_fit: bool) -> None:
    owner = OwnerSettings(late_write_s=120.0, pause_max_s=60.0)
    nvme = NvmeSettings(initiator="userspace", keep_alive_s=5, io_timeout_s=io_timeout_s)
    if is_fit:
        AgentSettings(owner=owner, nvme=nvme)
    else:
        with pytest.raises(UsageError, match=r"60\.5 s late.*is 60 s"):
            AgentSettings(owner=owner, nvme=nvme)
    kernel = NvmeSettings(io_timeout_s=io_timeout_s)
    AgentSettings(owner=owner, nvme=kernel)  # bounded by the kernel's own time-outs instead
