"""S5: time without blocks of a killed agent, beside the lifetime of a lease.

Three agents are processes, with a real etcd. The script kills the agent with most shards by SIGKILL. A worker
of another agent gets every committed block until all are present. A permanently missing block or a wrong byte
ends the measurement. Then the script restarts the agent. Kills come at a random time between two renewals of
the lease, because the rest of the lease is most of the figure.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from benchmarks.support.figure import Figure, Target
from benchmarks.support.pods import can_run, running_pod
from tests.support.pod.processes import TTL_S, until
from tests.support.pod.work import CHAINS, await_puts, missing, put

from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions

_KILLS = 100
_KILLS_SHORT = 1
_AGENTS = 3
_MORE_S = 2.0
_LATE_S = 30.0
_LOOK_EVERY_S = 0.02


def run(conditions: Conditions) -> list[Figure]:
    """Kill agents."""
    if not can_run("s5"):
        return []
    took = Series(tuple(_times(conditions, _KILLS_SHORT if conditions.is_short else _KILLS)))
    finding = Measurement("killed", took, "its lease", Series((TTL_S,) * len(took.values)))
    target = Target(value_at_most=TTL_S + _MORE_S)
    return [
        Figure("S5", "all blocks of a killed agent are back, median", "s", finding, target),
        Figure("S5", "the same, p99; none lost, none wrong", "s", finding, target, quantile=0.99),
    ]


def _times(conditions: Conditions, kills: int) -> list[float]:
    took_s = []
    with running_pod(conditions, _AGENTS) as pod:
        for _ in range(kills):
            dying = pod.owner()
            other = next(agent for agent in pod.agents if agent is not dying)
            with other.connect() as client:
                await_puts(client)
                if put(client) != list(CHAINS):
                    raise MeasureError("blocks could not be put")
                threading.Event().wait(random.uniform(0.0, TTL_S))
                dying.kill()
                took_s.append(
                    until(
                        lambda: not missing(client, deadline_s=0.5),
                        "all blocks",
                        within_s=_LATE_S,
                        every_s=_LOOK_EVERY_S,
                    )
                )
            pod.start()
    return took_s
