"""S10: cost of an agent in a pod with many drives, beside an agent that has only the drives of its shards.

A real etcd holds the records of a pod: another agent owns all shards but a few. Only the measured agent runs.
It attaches every drive and owns the rest of the shards. Drives are sparse files. Memory is the process's
memory beyond staging and index; there is no DRAM cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from benchmarks.support.figure import Figure, Target
from benchmarks.support.pods import can_run
from tests.fabric.membership.nodes import Cluster
from tests.support.pod.processes import Pod, until

from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_cli.tools.bench.workload import MeasureError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.schema import records
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.fabric_map import AgentRecord, Claim
from ostraca_fabric.model.ids import AgentId, OwnerEpoch, ShardId, StartId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.support.conditions import Conditions

MB = 1e6
_STAGING_BYTES = 64 << 20
_SETTINGS = (
    "memory.cache_bytes=0",
    f"memory.staging_bytes={_STAGING_BYTES}",
    "memory.chunk_bytes=4MiB",
)
_DRIVES = 16
"""Of an enclosure."""

_DRIVE_BYTES = 32 << 20
_OWNED = 16
_OPERATIONS = 100
"""Of a transaction; etcd allows 128."""

_LEASE_S = 3600
_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class _Cost:
    """Cost of a running agent."""

    threads: int
    memory_mb: float
    busy_percent: float
    attach_s: float
    """From the start of the process until all drives are attached and the shards served."""


def run(conditions: Conditions) -> list[Figure]:
    """Start three agents, one after another."""
    if not can_run("many_drives"):
        return []
    owned = 1 if conditions.is_short else _OWNED
    many = 4 if conditions.is_short else 1152
    dense = 2 if conditions.is_short else 128
    found = _cost(conditions, drives=many, owned=owned)
    alone = _cost(conditions, drives=owned, owned=owned)
    owning = _cost(conditions, drives=dense, owned=dense)
    text = f"{many} drives attached, {owned} owned"

    def figure(name: str, unit: str, value: float, limit: float, most: float) -> Figure:
        beside = Measurement("many", Series((value,)), f"{owned} drives", Series((limit,)))
        return Figure("S10", name, unit, beside, Target(value_at_most=most))

    return [
        figure(f"{text}: threads", "", found.threads, alone.threads, 64),
        figure(f"{text}: memory beyond staging and index", "MB", found.memory_mb, alone.memory_mb, 150),
        figure(f"{text}: idle processor, of a core", "%", found.busy_percent, alone.busy_percent, 3),
        figure(f"{text}: time to attach", "s", found.attach_s, alone.attach_s, 10),
        figure(f"{dense} drives attached and owned: threads", "", owning.threads, alone.threads, 64),
    ]


def _cost(conditions: Conditions, *, drives: int, owned: int) -> _Cost:
    with _pod(conditions, drives) as pod:
        if drives > owned:
            asyncio.run(_claim(pod, drives - owned))
        agent = pod.agent("agent-0", transport="nixl", environment=dict(os.environ))  # starts cold
        begun_s = time.monotonic()
        agent.launch()
        agent.await_ready()

        def is_attached() -> bool:
            status = agent.status()
            return (
                status is not None
                and len(status.shards) == owned
                and len(status.drives) == drives
                and all(shard.recovered == 1.0 for shard in status.shards)
            )

        until(is_attached, f"{owned} shards served, {drives} drives attached", within_s=_WITHIN_S)
        attach_s = time.monotonic() - begun_s
        assert agent.process is not None
        process = psutil.Process(agent.process.pid)
        time.sleep(0.2 if conditions.is_short else 3.0)  # for what follows the start
        before, begun_s = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(0.2 if conditions.is_short else 20.0)
        busy = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun_s)
        status = agent.status()
        assert status is not None, "the agent answers"
        index_bytes = sum(shard.index_bytes for shard in status.shards)
        memory_mb = (process.memory_info().rss - _STAGING_BYTES - index_bytes) / MB
        return _Cost(process.num_threads(), memory_mb, 100 * busy, attach_s)


@contextlib.contextmanager
def _pod(conditions: Conditions, drives: int) -> Iterator[Pod]:
    """Create a pod on sparse files meanwhile. Raises MeasureError as ``running_pod``."""
    enclosures = max(1, drives // _DRIVES)
    per_enclosure = drives // enclosures
    assert enclosures * per_enclosure == drives, "drives fill enclosures"
    cluster = Cluster(conditions.new_directory())
    try:
        with Pod(conditions.new_directory(), cluster, settings=_SETTINGS) as pod:
            pod.create(enclosures=enclosures, drives=per_enclosure, capacity=str(drives * _DRIVE_BYTES))
            yield pod
    except AssertionError as error:
        raise MeasureError(str(error)) from error
    finally:
        cluster.close()


async def _claim(pod: Pod, count: int) -> None:
    """Claim *count* shards for another agent, which does not run.

    With more than its share of the shards, this agent comes last for the rest.
    """
    shards = sorted(ShardId(shard["shard"]) for each in pod.listed("enclosures/") for shard in each["shards"])
    keys, client = EtcdKeys(pod.prefix), EtcdClient(EtcdSettings(pod.etcd.endpoints), dice=random.Random(7))
    other = AgentRecord(AgentId("other"), StartId(bytes(16)), ("tcp://127.0.0.1:9",))
    entries = [(keys.agent(other.id), records.encode_agent(other))] + [
        (keys.claim(shard), records.encode_claim(shard, Claim(other.id, other.start, OwnerEpoch(1))))
        for shard in shards[:count]
    ]
    try:
        lease = (await client.lease_grant(_LEASE_S)).ID
        for first in range(0, len(entries), _OPERATIONS):
            batch = entries[first : first + _OPERATIONS]
            await client.txn((), [put(key, value, lease) for key, value in batch])
    finally:
        await client.close()
