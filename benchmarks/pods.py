"""Agents that are processes of their own, with a real etcd: what a fabric in one process can't show."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.etcd.nodes import Cluster, program
from tests.pod.processes import Pod

from ostraca.cli.bench.workload import MeasureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.conditions import Conditions


def can_run(name: str) -> bool:
    """Whether agents can be run as processes; says that what is *name* is left out where they can't."""
    if program() is not None and all(map(find_spec, ("grpc", "google"))):
        return True
    print(f"{name} is left out: there is no etcd, or no grpc to talk to it", file=sys.stderr)
    return False


@contextlib.contextmanager
def running_pod(conditions: Conditions, agents: int, *, transport: str = "inline") -> Iterator[Pod]:
    """Run a fabric with so many agents meanwhile, every shard owned by one of them.

    It has so many segments that nothing is evicted in a hundred takeovers. What does not come about in time
    ends the measurement, also within: it raises MeasureError.
    """
    cluster = Cluster(conditions.new_directory())
    try:
        with Pod(conditions.new_directory(), cluster) as pod:
            pod.create(capacity="4GiB")
            for number in range(agents):
                pod.agent(f"agent-{number}", transport=transport)
            pod.start()
            yield pod
    except AssertionError as error:
        raise MeasureError(str(error)) from error
    finally:
        cluster.close()
