"""Harness: start all stores, then let them take turns at each operation, round by round.

The order of the stores alternates from round to round, so that a slow phase of the machine affects all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.peers import environments, outcome
from benchmarks.peers.client import StoreClient, StoreFailedError, running_client
from benchmarks.peers.environments import PeerMissingError, Surroundings
from benchmarks.peers.outcome import Operation, Outcome, StoreRun
from benchmarks.peers.stores.plain_files import DIRECT
from benchmarks.peers.stores.turns import Order
from benchmarks.support.conditions import KIB, MIB


@dataclass(frozen=True, slots=True)
class KnownStore:
    """Store that the harness can run."""

    label: str
    transport: str
    module: str
    install: Callable[[Path, str], Surroundings]
    variant: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the store is Ostraca."""
        return self.label == "Ostraca"


STORES = {
    "ostraca": KnownStore("Ostraca", "memory reads", "own_fabric", environments.own, "memory"),
    "ostraca-nixl": KnownStore("Ostraca", "shared memory (NIXL)", "own_fabric", environments.own, "nixl"),
    "ostraca-tcp": KnownStore("Ostraca", "TCP (inline)", "own_fabric", environments.own, "inline"),
    "mooncake": KnownStore("Mooncake", "TCP", "mooncake_store", environments.mooncake),
    "mooncake-checksum": KnownStore(
        "Mooncake", "TCP, checksum", "mooncake_store", environments.mooncake, "checksum"
    ),
    "redis": KnownStore("Redis", "TCP", "redis_server", environments.redis),
    "files": KnownStore("plain files", "page cache", "plain_files", environments.own),
    "files-direct": KnownStore("plain files", DIRECT, "plain_files", environments.own, DIRECT),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and length of a run; turns of the first rounds are discarded."""

    rounds: int
    warm_ups: int = 2
    blocks: int = 64
    block_bytes: int = MIB
    singles: int = 16
    keys: int = 512

    @classmethod
    def short(cls) -> Plan:
        """Return a plan of a smoke test."""
        return cls(rounds=2, warm_ups=1, blocks=4, block_bytes=64 * KIB, singles=2, keys=16)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the operations of a round."""
        return outcome.operations(blocks=self.blocks, block_bytes=self.block_bytes, keys=self.keys)

    def order(self, directory: Path, variant: str) -> Order:
        """Return the order for a client."""
        rounds = self.warm_ups + self.rounds
        return Order(
            *(self.blocks, self.block_bytes, self.singles, self.keys, rounds), str(directory), variant
        )


def measure(
    names: Sequence[str],
    plan: Plan,
    directory: Path,
    cache: Path,
    on_progress: Callable[[str, float], None],
) -> Outcome:
    """Measure the named stores; *on_progress* receives the phase and its completed part.

    A store that can't be installed or started, or fails later, has no figures in the outcome.
    """
    missing: dict[str, str] = {}
    players: dict[str, tuple[StoreRun, StoreClient]] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names):
            on_progress("start of all stores", number / len(names))
            try:
                players[name] = _started(stack, name, plan, directory, cache)
            except (PeerMissingError, StoreFailedError) as error:
                missing[name] = str(error)
        failures = _play(players, plan, lambda part: on_progress("turns of all stores", part))
    return Outcome(plan.operations, tuple(run for run, _ in players.values()), missing, failures)


def _started(
    stack: contextlib.ExitStack, name: str, plan: Plan, directory: Path, cache: Path
) -> tuple[StoreRun, StoreClient]:
    store, folder = STORES[name], directory / name
    folder.mkdir()
    surroundings = store.install(cache, store.variant)
    order = plan.order(folder, surroundings.variant)
    client, version = stack.enter_context(
        running_client(store.module, surroundings, order, directory / f"{name}.log")
    )
    seconds: dict[str, list[float]] = {operation.name: [] for operation in plan.operations}
    return StoreRun(name, store.label, store.transport, version, store.is_ours, seconds), client


def _play(
    players: dict[str, tuple[StoreRun, StoreClient]], plan: Plan, on_progress: Callable[[float], None]
) -> dict[str, str]:
    """Play all rounds; remove players that fail, and return the reasons."""
    failures: dict[str, str] = {}
    rounds = plan.warm_ups + plan.rounds
    for number in range(rounds):
        on_progress(number / rounds)
        for operation in plan.operations:
            for name in list(reversed(players) if number % 2 else players):
                run, client = players[name]
                try:
                    spent_s = median(client.turn(operation.name))
                except StoreFailedError as error:
                    failures[name] = str(error)
                    del players[name]
                else:
                    run.seconds[operation.name] += [spent_s] if number >= plan.warm_ups else []
    return failures
