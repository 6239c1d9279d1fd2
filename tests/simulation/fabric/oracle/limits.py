"""What an agent never has more of than its settings say, whatever is asked of it.

So that overload sheds puts before gets, puts hold no more of staging than their share; and no worker holds
more than its own, so that one that has stopped leaves the others theirs. A worker that held nothing may take
what it needs at once, which is no more than its share here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.shard.model import ViolationError

from ostraca_dpu_agent.datapath.staging.leases import Purpose
from ostraca_dpu_agent.server.dispatcher import WorkerSession

if TYPE_CHECKING:
    from tests.simulation.fabric.world.process import AgentProcess

    from ostraca_dpu_agent.settings import AgentSettings


def check_limits(process: AgentProcess, settings: AgentSettings) -> None:
    """Look at all that an agent has under way."""
    memory, staging = settings.memory, process.agent._staging
    staging_bytes = memory.staging_bytes
    held = {
        "requests under way": (staging.tenants.requests.total(), settings.flow.requests_max),
        "bytes of staging on lease": (staging.held_bytes, staging_bytes),
        "bytes of staging for puts": (
            staging._held[Purpose.PUT].total(),
            int(memory.put_share * staging_bytes),
        ),
        "bytes in its cache": (staging.cache.used_bytes, memory.cache_bytes),
    }
    for holder, held_bytes in staging._held_by.items():
        if isinstance(holder, WorkerSession):
            its = f"bytes of staging for the worker of {holder.worker}"
            held[its] = (held_bytes, int(memory.worker_share * staging_bytes))
    for what, (has, most) in held.items():
        if has > most:
            raise ViolationError(f"{process.name} has {has} {what}, and the most is {most}")
