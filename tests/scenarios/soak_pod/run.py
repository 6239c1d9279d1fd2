"""One soak of a pod, in rounds.

In each round an adversary has its way for a while; then all is made well, and every agent must serve again.
Then all agents are killed at once, flash is read without Ostraca's code, and the ledger is held against it
and against what the agents say when they are back. In some rounds flash is damaged as well: blocks may be
lost in those, and wrong bytes may not be handed over.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tests.scenarios.soak.crew import Worker as TrafficWorker
from tests.scenarios.soak.traffic import BLOCK_BYTES, LAYOUT, hashes
from tests.scenarios.soak.watch import Watch
from tests.scenarios.soak.worker import VOLUMES, Task
from tests.scenarios.soak_flash.flash import FlashReader
from tests.scenarios.soak_flash.ledger import Ledger, ShardSeen
from tests.scenarios.soak_flash.life import StartError
from tests.scenarios.soak_flash.worker import VOLUME
from tests.scenarios.soak_flash.worker import Worker as LedgerWorker
from tests.scenarios.soak_pod.adversary import Adversary
from tests.scenarios.soak_pod.pod import LATE_WRITE_S, TENANTS, PodError, SoakPod
from tests.scenarios.soak_pod.story import Story
from tests.sdk.front_ends import FRONT_ENDS

import ostraca
from ostraca import BlockState
from ostraca.settings import ClientSettings

MIB = 1 << 20
PROGRESS_S = 15.0
DAMAGED_OF = 3
"""One in so many rounds is one in which flash is damaged. The first is not."""

CALM_S = 3.0
PUTS_WITHIN_S = 5 * LATE_WRITE_S
"""So soon after all is well puts go through: a shard that was handed over several times within a minute has
no segment left that nobody before may still be writing."""

PACES_S = (2.0, 4.0, 8.0)
"""The longest time between two faults, drawn for each round. In slow ones shards keep their owners."""

GRANTS_LOOK_S = 3.0
BEGUN_WITHIN_S = 60.0
TRAFFIC_REST_S = 0.02
LEDGER_REST_S = 0.05
"""Between operations of a thread: etcd and agents have the same few processors."""

TRANSPORTS = {"inline": ("inline",), "nixl": ("nixl", "inline")}


@dataclass(frozen=True, slots=True)
class Options:
    """What to do."""

    directory: Path
    minutes: float = 60.0
    seed: int = 0
    agents: int = 5
    workers: int = 2
    transport: str = "inline"
    round_s: float = 75.0
    """How long the adversary has its way, about."""

    pace_s: float | None = None
    """The longest time between two faults; None to draw it for each round."""

    capacity: str = "2322MiB"
    """Of six drives: 96 segments each."""

    has_hosts: bool = False
    first: tuple[str, ...] = ()
    """Deeds of the adversary that come first, each once; no round ends before they are done."""


class Soak:
    """One run; ``run`` it in a ``with`` block."""

    def __init__(self, options: Options) -> None:
        """Plan it."""
        self.violations: list[str] = []
        self.is_enough = False
        self.story = Story()
        self.rounds = 0
        self.longest_wait_s = 0.0
        """Until puts and gets went through again when all was well."""

        self.ledger = Ledger()
        self._options = options
        self._dice = random.Random(options.seed)
        self._told_s = self._looked_s = 0.0
        self._withheld: list[dict[str, frozenset[int]]] = []
        """Which segments were withheld in this round, each time it was looked."""

        self._pod = SoakPod(
            options.directory,
            self.story,
            agents=options.agents,
            transport=options.transport,
            has_hosts=options.has_hosts,
            capacity=options.capacity,
        )
        self._crew: list[TrafficWorker] = []
        self._watch = Watch(self._crew)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave no process behind."""
        for worker in self._crew:
            worker.leave()
        self._pod.__exit__()

    def run(self) -> None:
        """Go on until the time is over, something is wrong, or it is enough."""
        try:
            self._pod.begin()
            self._crew += [self._traffic(number) for number in range(self._options.workers)]
            self._await_crew()
            self._adversary = Adversary(
                self._pod, self._crew, seed=self._options.seed, first=self._options.first
            )
            self._rounds()
        except (PodError, StartError) as error:
            self._add([str(error)])
        self._add(self._pod.crashes())
        self._add(self._watch.late())
        self._add(self._watch.errors())

    def _rounds(self) -> None:
        addresses = [each.agent.address for each in self._pod.agents]
        others = [each.agent.reached_at for each in self._pod.agents[::-1]]
        with LedgerWorker(
            [addresses, others],
            self.ledger,
            seed=self._options.seed,
            credentials=self._pod.token(),
            rest_s=LEDGER_REST_S,
        ) as worker:
            record = worker.volume._spec.record
            reader = FlashReader(
                self._pod.files,
                tenant=record.tenant,
                volume=VOLUME,
                incarnation=record.incarnation,
                is_alone=False,
            )
            until_s = time.monotonic() + 60 * self._options.minutes
            while not (self.violations or self.is_enough):
                self._round(worker, reader, until_s)
                if time.monotonic() > until_s:
                    break
            if not self.violations:
                self._add(self._watch.finish())
                self._look_for_leftovers()
                self._add(self._pod.stop())

    def _round(self, worker: LedgerWorker, reader: FlashReader, until_s: float) -> None:
        damages = self.rounds % DAMAGED_OF == 1
        self.story.chapter(f"round {self.rounds}{', with damage to flash' if damages else ''}")
        self.ledger.is_strict, self.ledger.is_calm = not damages, False
        before = self._pod.pod.epochs()
        self._withheld = [self._pod.pod.withheld()]
        worker.go()
        try:
            self._disturb(until_s, damages=damages)
        finally:
            worker.rest()
        self.story.tell("all is made well")
        self._adversary.end_all()
        self._add(self._adversary.wrong)
        if self.violations:
            return
        self._pod.start()
        self.story.tell(f"all agents serve: {self._pod.shares()}")
        self._be_at_peace(worker)
        after = self._pod.pod.epochs()
        handed_over = frozenset(shard for shard, epoch in after.items() if before.get(shard) != epoch)
        self.story.tell(f"shards handed over: {len(handed_over)} of {len(after)}")
        if not self.violations:
            self._look_at_flash(worker, reader, handed_over)
        self.rounds += 1

    def _disturb(self, until_s: float, *, damages: bool) -> None:
        """Let the adversary have its way."""
        lasts_s = self._options.round_s * self._dice.uniform(0.6, 1.4)
        over_s = min(until_s, time.monotonic() + lasts_s)
        pace_s = self._options.pace_s or self._dice.choice(PACES_S)
        while (self._adversary.has_first or time.monotonic() < over_s) and not (
            self.violations or self.is_enough
        ):
            self._adversary.act(pace_s=pace_s, damages=damages)
            self._see()
            if self.story.passed_s > self._told_s + PROGRESS_S:
                self._told_s = self.story.passed_s
                print(self.progress(), flush=True)

    def _see(self) -> None:
        """See whether everybody lives and nothing is wrong so far."""
        running = [each for each in self._pod.agents if each.name not in self._adversary.held]
        self._add([*self._watch.look(running), *self._watch.late(), *self._adversary.wrong])
        if self._adversary.is_etcd_whole and self.story.passed_s > self._looked_s + GRANTS_LOOK_S:
            self._looked_s = self.story.passed_s
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # it has no leader now
                self._withheld.append(self._pod.pod.withheld())
        self._add(self.ledger.violations)

    def _be_at_peace(self, worker: LedgerWorker) -> None:
        """Use the pod undisturbed: puts and gets must go through, and what was committed must be there."""
        self.ledger.is_calm = True
        committed, verified = self.ledger.counts["committed"], self._watch.seen().verified
        began_s = time.monotonic()

        def lacking() -> list[str]:
            return [
                *(["no put is committed"] if self.ledger.counts["committed"] == committed else []),
                *(["no worker got anything"] if self._watch.seen().verified == verified else []),
            ]

        worker.go()
        try:
            while (passed_s := time.monotonic() - began_s) < CALM_S or (
                lacking() and passed_s < PUTS_WITHIN_S
            ):
                self._see()
                time.sleep(0.25)
        finally:
            worker.rest()
        self.longest_wait_s = max(self.longest_wait_s, passed_s)
        self._add([f"{words} for {passed_s:.0f} s though all is well" for words in lacking()])
        worker.look_up_all()
        for each in self._pod.agents:
            self._ask_as_a_stranger(each.agent.address)

    def _ask_as_a_stranger(self, address: str) -> None:
        """Ask an agent, as a tenant that never puts, for blocks that others have under the same names."""
        settings = ClientSettings(arena_bytes=16 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
        with ostraca.connect(address, tenant=TENANTS[-1], settings=settings) as client:
            for name in VOLUMES:
                volume = client.volume(name, LAYOUT, block_bytes=BLOCK_BYTES, create=True)
                chain = volume.chain(hashes(range(256)), is_chained=False)
                found = volume.lookup(chain, deadline_s=2.0).states.count(BlockState.HIT)
                if found:
                    self._add(
                        [f"{found} blocks of other tenants are found by one that has none, at {address}"]
                    )

    def _look_at_flash(self, worker: LedgerWorker, reader: FlashReader, handed_over: frozenset[str]) -> None:
        """Kill all agents, see what flash lists, and hold agents to it when they are back."""
        self._pod.kill()
        self.story.tell("all agents are killed")
        reader.know(worker.put_ever)
        seen, _ = reader.look()
        damaged = {number: seen.places[number] for number in reader.damaged}
        fresh = self.ledger.see_damaged(damaged, reader.damaged_anywhere, by_us=not self.ledger.is_strict)
        self._add([f"DAMAGED WITHOUT A CAUSE: {reader.damaged[number]}" for number in sorted(fresh)[:8]])
        whole = {number: at for number, at in seen.places.items() if number not in self.ledger.damaged}
        self._withheld.append(self._pod.pod.withheld())
        shards = {name: self._with_withheld(name, shard) for name, shard in seen.shards.items()}
        self.ledger.see(replace(seen, places=whole, shards=shards), handed_over=handed_over)
        self._add(self.ledger.violations)
        self._pod.start()
        self.story.tell("all agents are back")
        self.ledger.withhold(self._pod.pod.withheld())
        worker.come_back()
        listed = sorted(self.ledger.listed)
        worker.get_all(self._dice.sample(listed, min(len(listed), 64)))
        self._add(self.ledger.violations)

    def _with_withheld(self, name: str, shard: ShardSeen) -> ShardSeen:
        """Add what was withheld when most of what was never written was."""
        unwritten = set(range(shard.segments)) - shard.generations.keys()
        looks = (each.get(name, frozenset()) for each in self._withheld)
        return replace(shard, withheld=max(looks, key=lambda withheld: len(withheld & unwritten)))

    def _look_for_leftovers(self) -> None:
        settings = ClientSettings(arena_bytes=4 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
        for each in self._pod.agents:
            with ostraca.connect(each.agent.address, settings=settings) as client:
                status = client.status()
            left = status.staging_used_bytes + status.quarantined_bytes + status.quarantined_cached_bytes
            if left:
                self._add([f"{each.name} keeps {left} bytes on their way to nobody"])

    def _traffic(self, number: int) -> TrafficWorker:
        """Run a worker of an agent's host, with failover to other agents."""
        front_ends, agents = sorted(FRONT_ENDS), self._pod.agents
        turn = number % len(agents)
        near = agents[turn]
        return TrafficWorker(
            number,
            Task(
                addresses=tuple(each.agent.address for each in agents[turn:] + agents[:turn]),
                transports=TRANSPORTS[self._options.transport],
                tenant=TENANTS[number % 2],
                front_end=front_ends[number % len(front_ends)],
                seed=(self._options.seed, number),
                blocks=300,
                report=self._options.directory / "worker.json",
                rest_s=TRAFFIC_REST_S,
                enters=None if near.host is None else near.host.entering,
            ),
        )

    def _await_crew(self) -> None:
        """Wait until every worker has begun: to make a volume takes etcd. Raises PodError."""
        until_s = time.monotonic() + BEGUN_WITHIN_S
        while not all(any(told.tally.operations for told in worker.told()) for worker in self._crew):
            if time.monotonic() > until_s:
                message = f"a worker has done nothing after {BEGUN_WITHIN_S:.0f} s"
                raise PodError(message)
            time.sleep(0.1)

    def _add(self, violations: Iterable[str]) -> None:
        """Note what is wrong, once, with when it was found."""
        for words in violations:
            if words not in self.violations:
                self.story.tell(f"VIOLATION: {words}")
                self.violations.append(words)

    def progress(self) -> str:
        """Say how it stands."""
        seen, counts = self._watch.seen(), self.ledger.counts
        minutes, faults = self.story.passed_s / 60, sum(self.story.deeds.values())
        return (
            f"{minutes:5.1f} min: round {self.rounds}, {faults} faults; "
            f"{sum(seen.operations.values()):,} operations, {seen.verified:,} blocks verified, "
            f"{len(self._watch.late())} late ({self._watch.late_anyhow()} with the machine's stalls); "
            f"{counts['committed']:,} committed, {len(self.ledger.listed):,} on flash, "
            f"{counts['evicted']:,} evicted; {len(self.violations)} violations"
        )

    def summary(self) -> str:
        """Say what was done and seen."""
        wait = f"longest until puts and gets went through when all was well: {self.longest_wait_s:.0f} s"
        lines = [self.progress(), wait, "faults:"]
        lines += [f"  {count:9,} {name}" for name, count in self.story.deeds.most_common()]
        lines.append("blocks of the ledger:")
        lines += [f"  {count:9,} {name}" for name, count in sorted(self.ledger.counts.items())]
        lines.append("blocks of the other workers:")
        lines += [f"  {count:9,} {name}" for name, count in self._watch.seen().outcomes.most_common()]
        return "\n".join(lines)
