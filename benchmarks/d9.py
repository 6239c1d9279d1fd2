"""D9: D1 between two hosts, over TCP: two network namespaces with a cable, beside a plain socket there.

UCX is told to use TCP alone: it would see that the two are one machine, and copy between their memories.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.conditions import batch_text
from benchmarks.figure import Figure, Target
from benchmarks.two_hosts import two_hosts, why_not
from ostraca.cli.bench import suite
from ostraca.cli.bench.fabric import running_fabric
from ostraca.cli.bench.series import Finding, Series
from ostraca.places import TOKEN_FILE
from ostraca_fabric.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.conditions import Conditions
    from benchmarks.two_hosts import Host
    from ostraca.cli.bench.suite import Plan

ONLY_TCP = {"UCX_TLS": "tcp"}
ROOT = Path(__file__).parents[1]


def run(conditions: Conditions) -> list[Figure]:
    """Measure where there can be two hosts; elsewhere say why not, and give no figure."""
    reason = why_not()
    if reason:
        print(f"d9 is left out: {reason}", file=sys.stderr)
        return []
    with two_hosts() as (agents, workers):
        return [_figure(plan, conditions, agents, workers) for plan in conditions.plans()]


def _figure(plan: Plan, conditions: Conditions, agents: Host, workers: Host) -> Figure:
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
    found = Finding("views", Series(tuple(said["measured"])), "TCP socket", Series(tuple(said["limit"])))
    what = f"get {batch_text(plan)} from DRAM, views, {said['transport']} over TCP"
    return Figure("D9", what, "GB/s", found, Target(ratio_at_least=0.9))


@contextlib.contextmanager
def _source(host: Host, plan: Plan) -> Iterator[int]:
    """Run the plain socket's other end there; yields its port."""
    command = (
        *host.inside,
        sys.executable,
        "-m",
        "benchmarks.tcp_source",
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
    host: Host, plan: Plan, address: str, token: str, source: tuple[str, int]
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
        (*host.inside, sys.executable, "-m", "benchmarks.d9_worker"),
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
