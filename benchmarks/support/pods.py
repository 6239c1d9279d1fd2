"""Agents as processes with a real etcd, for effects absent from a fabric in one process."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tests.fabric.membership.nodes import Cluster, program
from tests.support.pod.processes import Pod

from ostraca_cli.tools.bench.workload import MeasureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.support.conditions import Conditions


def can_run(name: str) -> bool:
    """Return whether agents can run as processes; if not, print that *name* is omitted."""
    if program() is not None and all(map(find_spec, ("grpc", "google"))):
        return True
    print(f"{name} is left out: there is no etcd, or no grpc to talk to it", file=sys.stderr)
    return False


@contextlib.contextmanager
def running_pod(conditions: Conditions, agents: int, *, transport: str = "inline") -> Iterator[Pod]:
    """Run a fabric with *agents* agents meanwhile, with an owner for every shard.

    The fabric has enough segments for a hundred takeovers without eviction. Raises MeasureError if the
    fabric, or an awaited event within the context, takes too long.
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
