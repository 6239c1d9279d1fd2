"""A pod that grows from one agent to two, three and nine, and loses three of them at once, in order.

No block may be lost, and each must be readable at every agent all along.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

from tests.fabric.membership.nodes import Cluster
from tests.support.pod.processes import UP_WITHIN_S, AgentProcess, Pod, until
from tests.support.pod.work import CHAINS, await_puts, missing, put

import ostraca

SIZES = (1, 2, 3, 9)
LEAVE = 3
SETTLED_WITHIN_S = 120.0


def open_with_nine(folder: Path) -> str:
    """Play it; return what to say of it. Raises AssertionError."""
    etcd = Cluster(folder)
    try:
        with Pod(folder, etcd) as pod:
            pod.create(enclosures=3, drives=6, capacity="306MiB")
            told = [_grow(pod, size) for size in SIZES]
            told.append(_leave(pod, pod.agents[:LEAVE]))
            pod.check_logs()
    finally:
        etcd.close()
    return "opening: " + ", ".join(told)


def _grow(pod: Pod, size: int) -> str:
    began_s = time.monotonic()
    idle = [pod.agent(f"agent-{number}") for number in range(len(pod.agents), size)]
    for agent in idle:
        agent.launch()
    for agent in idle:
        agent.await_ready()
    pod.await_settled(within_s=SETTLED_WITHIN_S)
    took_s = time.monotonic() - began_s
    with pod.agents[-1].connect() as client:
        await_puts(client)
        mine = range(1000 * size, 1000 * size + len(CHAINS))
        assert put(client, mine) == list(mine), f"puts at the last of {size}"
    _check(pod, size)
    return f"{size} agents after {took_s:.0f} s with {_shares(pod)} shards"


def _leave(pod: Pod, leaving: list[AgentProcess]) -> str:
    began_s = time.monotonic()
    for agent in leaving:
        agent.signal(signal.SIGTERM)
    for agent in leaving:
        assert agent.ended() == 0, f"{agent.name} ended wrongly: {agent.log.read_text()[-2000:]}"
    pod.agents = [agent for agent in pod.agents if agent not in leaving]
    left = {agent.name for agent in leaving}
    until(lambda: not left & set(pod.claims().values()), "nobody who left owns a shard", within_s=UP_WITHIN_S)
    pod.await_settled(within_s=SETTLED_WITHIN_S)
    took_s = time.monotonic() - began_s
    _check(pod, SIZES[-1])
    return f"{len(pod.agents)} agents {took_s:.0f} s after SIGTERM of {LEAVE} with {_shares(pod)} shards"


def _check(pod: Pod, size: int) -> None:
    """Every block put so far can be got at every agent."""
    chains = [1000 * each + chain for each in SIZES if each <= size for chain in CHAINS]
    for agent in pod.agents:
        with agent.connect() as client:
            # Not at once: an agent that kept another waiting for 0.2 s is held off for a second.
            until(partial(_is_whole, client, chains), f"{agent.name} of {size} gets every block")


def _is_whole(client: ostraca.Client, chains: list[int]) -> bool:
    return not missing(client, chains)


def _shares(pod: Pod) -> str:
    owners = list(pod.claims().values())
    return "/".join(str(owners.count(agent.name)) for agent in pod.agents)
