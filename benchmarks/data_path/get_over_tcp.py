"""D9: D1 between two hosts, over TCP: two connected network namespaces, beside a plain socket there.

UCX is restricted to TCP: otherwise UCX would detect a single machine, and copy between memories.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.support.conditions import batch_text
from benchmarks.support.figure import Figure, Target
from benchmarks.support.two_hosts import two_hosts, unavailable_reason

from ostraca_cli.tools.bench import suite
from ostraca_cli.tools.bench.fabric import running_fabric
from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_fabric.errors import ConnectError
from ostraca_fabric.sockets.default_paths import TOKEN_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.support.conditions import Conditions
    from benchmarks.support.two_hosts import Host

    from ostraca_cli.tools.bench.suite import BenchPlan

ONLY_TCP = {"UCX_TLS": "tcp"}
ROOT = Path(__file__).parents[2]


def run(conditions: Conditions) -> list[Figure]:
    """Measure between two hosts; without network namespaces, print the reason and return no figure."""
    reason = unavailable_reason()
    if reason:
        print(f"d9 is left out: {reason}", file=sys.stderr)
        return []
    with two_hosts() as (agents, workers):
        return [_figure(plan, conditions, agents, workers) for plan in conditions.plans()]


def _figure(plan: BenchPlan, conditions: Conditions, agents: Host, workers: Host) -> Figure:
    directory = conditions.new_directory()
    options = ("--capacity", str(plan.capacity_bytes), "--dram", str(suite.dram_bytes(plan)))
    listening = ("--listen", f"tcp://{agents.address}:0")
    with (
        running_fabric(directory, *options, *listening, inside=agents.inside, environment=ONLY_TCP) as fabric,
        _source(agents, plan) as port,
    ):
        said = _measured(
            workers, plan, fabric.addresses[-1], (directory / TOKEN_FILE).read_text(), (agents.address, port)
        )
    found = Measurement("views", Series(tuple(said["measured"])), "TCP socket", Series(tuple(said["limit"])))
    what = f"get {batch_text(plan)} from DRAM, views, {said['transport']} over TCP"
    return Figure("D9", what, "GB/s", found, Target(ratio_at_least=0.9))


@contextlib.contextmanager
def _source(host: Host, plan: BenchPlan) -> Iterator[int]:
    """Run the other end of the plain socket on *host*; yield its port."""
    command = (
        *host.inside,
        sys.executable,
        "-m",
        "benchmarks.support.tcp_source",
        host.address,
        str(plan.batch_bytes),
    )
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdout is not None
        try:
            yield int(source.stdout.readline())
        finally:
            source.terminate()


def _measured(
    host: Host, plan: BenchPlan, address: str, token: str, source: tuple[str, int]
) -> dict[str, list[float]]:
    order = {
        "address": address,
        "token": token.strip(),
        "blocks": plan.blocks,
        "block_bytes": plan.block_bytes,
        "source": source,
        "seconds": plan.pace.seconds,
        "rounds_min": plan.pace.rounds_min,
        "warm_ups": plan.pace.warm_ups,
    }
    done = subprocess.run(
        (*host.inside, sys.executable, "-m", "benchmarks.data_path.get_over_tcp_worker"),
        cwd=ROOT,
        env=os.environ | ONLY_TCP,
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConnectError(f"the worker's host ended with {done.returncode}: {done.stderr.strip()}")
    said: dict[str, list[float]] = json.loads(done.stdout)
    return said
