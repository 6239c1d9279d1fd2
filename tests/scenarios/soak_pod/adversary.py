"""What befalls a pod in a soak, drawn from a seed: several things at once, each of which ends again."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from tests.contract.network.sockets import cut_internet
from tests.fabric.membership.nodes import Node
from tests.scenarios.soak.crew import Worker
from tests.scenarios.soak_pod.pod import STOP_MAX_S, Guarded, SoakPod
from tests.support.fabric.fabric_host import drive_files, overwrite
from tests.support.pod.network import Host, Way

MIB = 1 << 20
PAGE = 4096
FIRST_BYTE = 1 * MIB
"""What lies before is a drive's own label, its superblocks and volume records."""

AT_ONCE_MAX = 3
BRIEF_S, SOME_S, LONG_S = (0.05, 1.0), (1.0, 6.0), (6.0, STOP_MAX_S)
"""How long something lasts: from, to."""

ETCD_AWAY_MAX_S = 12.0
FLIPS_MAX = 4
"""In each drive and at a time. More of them, and a drive is left alone as one that fails, rightly."""


@dataclass
class Fault:
    """Something that lasts."""

    words: str
    until_s: float
    end: Callable[[], None]


class Adversary:
    """Disturbs a pod between ``act`` and ``end_all``."""

    def __init__(
        self, pod: SoakPod, workers: Sequence[Worker], *, seed: int, first: Sequence[str] = ()
    ) -> None:
        """Do what is in *first* before anything is drawn, as far as this machine can."""
        self.wrong: list[str] = []
        """What was found wrong in ending faults."""

        self._pod = pod
        self._workers = workers
        self._dice = random.Random(seed)
        self._faults: list[Fault] = []
        self._held: set[str] = set()
        """Agents that are stopped, or do not run."""

        self._is_etcd_whole = True
        self._deeds: list[tuple[int, Callable[[], None]]] = [
            (5, self.kill_agent),
            (3, self.end_agent),
            (4, self.stop_agent),
            (2, self.kill_worker),
            (2, self.stop_worker),
            (2, self.break_connections),
            (2, self.lose_member),
            (1, self.pause_member),
            (1, self.lose_etcd),
        ]
        if pod.network is not None:
            self._deeds += [
                (4, self.cut_agents),
                (3, self.cut_agent_from_etcd),
                (2, self.cut_agent_from_all),
                (2, self.cut_agent_from_worker),
                (1, self.cut_members),
            ]
        known = {deed.__name__: deed for _, deed in self._deeds}
        self._first = [known[name] for name in first if name in known]
        self._damages: list[tuple[int, Callable[[], None]]] = [
            (8, self.flip_bits),
            (6, self.tear_pages),
            (4, self.fill_disk),
        ]

    @property
    def is_etcd_whole(self) -> bool:
        """Whether all members of etcd run."""
        return self._is_etcd_whole

    @property
    def has_first(self) -> bool:
        """Whether something is to be done yet before anything is drawn."""
        return bool(self._first)

    @property
    def held(self) -> set[str]:
        """Agents whose processes do not run, or are stopped."""
        return self._held

    def act(self, *, pace_s: float, damages: bool) -> None:
        """End what is over, do something new, and wait for *pace_s* at most."""
        self._end_what_is_over()
        if len(self._faults) < AT_ONCE_MAX:
            if self._first:
                self._do_first()
            else:
                deeds = self._deeds + (self._damages if damages else [])
                _, deed = self._dice.choices(deeds, [weight for weight, _ in deeds])[0]
                deed()
        time.sleep(self._dice.uniform(0.05, pace_s))

    def end_all(self) -> None:
        """End whatever still lasts."""
        for fault in self._faults:
            fault.until_s = 0.0
        self._end_what_is_over()

    def _do_first(self) -> None:
        """Do the next of what is to be done first; it stays so where nobody is there now to do it to."""
        deeds = self._pod.story.deeds
        before = deeds.total()
        self._first[0]()
        if deeds.total() > before:
            del self._first[0]

    def kill_agent(self) -> None:
        if (each := self._agent()) is not None:
            each.agent.kill()
            self._hold(each, "kills", self._lasting(), each.launch)

    def end_agent(self) -> None:
        each = self._agent()
        if each is None or not each.has_said_ready():
            return

        def launch() -> None:
            wrong = each.await_end()
            if wrong is None:
                each.launch()
            else:
                self.wrong.append(wrong)

        each.agent.signal(signal.SIGTERM)
        self._hold(each, "ends in order", self._lasting(), launch)

    def stop_agent(self) -> None:
        if (each := self._agent()) is not None:
            each.agent.signal(signal.SIGSTOP)
            self._hold(each, "stops", self._lasting(), lambda: each.agent.signal(signal.SIGCONT))

    def kill_worker(self) -> None:
        worker = self._dice.choice(self._workers)
        self._tell("kill_worker", f"kills {worker.name}")
        worker.kill()

    def stop_worker(self) -> None:
        worker, lasts_s = self._dice.choice(self._workers), self._dice.choice((0.02, 0.2, 1.0, 3.0))
        self._tell("stop_worker", f"stops {worker.name} for {lasts_s} s")
        worker.stop_for(lasts_s)

    def break_connections(self) -> None:
        if (each := self._agent()) is not None:
            self._tell("break_connections", f"breaks all TCP connections of {each.name}")
            with contextlib.suppress(pytest.skip.Exception, OSError):  # this machine does not let us
                cut_internet(each.pid)

    def lose_member(self) -> None:
        if (node := self._member()) is not None:
            node.kill()
            self._hurt_etcd(
                "lose_member", f"kills {node.name} of etcd", self._lasting(), self._pod.etcd.launch
            )

    def pause_member(self) -> None:
        if (node := self._member()) is not None:
            node.pause()
            self._hurt_etcd("pause_member", f"stops {node.name} of etcd", self._lasting(), node.resume)

    def lose_etcd(self) -> None:
        if self._is_etcd_whole:
            self._pod.etcd.kill()
            lasts_s = self._dice.uniform(1.0, ETCD_AWAY_MAX_S)
            self._hurt_etcd("lose_etcd", "kills all of etcd", lasts_s, self._pod.etcd.launch)

    def cut_agents(self) -> None:
        """Two of them from each other, or one way."""
        first, second = self._dice.sample(self._pod.agents, 2)
        if first.host is not None and second.host is not None:
            self._cut("cut_agents", first.host, first.name, [second.host], second.name)

    def cut_agent_from_etcd(self) -> None:
        each = self._dice.choice(self._pod.agents)
        if each.host is not None:
            self._cut("cut_agent_from_etcd", each.host, each.name, self._pod.etcd_hosts, "etcd")

    def cut_agent_from_all(self) -> None:
        each = self._dice.choice(self._pod.agents)
        if each.host is not None and self._pod.network is not None:
            self._cut("cut_agent_from_all", each.host, each.name, self._pod.network.hosts, "all others")

    def cut_members(self) -> None:
        """One of etcd's from the others."""
        host = self._dice.choice(self._pod.etcd_hosts)
        self._cut("cut_members", host, f"etcd's host {host.number}", self._pod.etcd_hosts, "its peers")

    def cut_agent_from_worker(self) -> None:
        """From the ledger's worker, which comes over TCP: what it answers is lost."""
        each, network = self._dice.choice(self._pod.agents), self._pod.network
        if each.host is None or network is None:
            return
        links = network.cut(each.host, [network.operator], Way.THERE)
        words = f"loses what {each.name} sends to its worker over TCP"
        self._begin("cut_agent_from_worker", words, self._lasting(), lambda: network.join(links))

    def flip_bits(self) -> None:
        self._tell("flip_bits", "flips bits")
        for path in drive_files(self._pod.files):
            for _ in range(self._dice.randrange(FLIPS_MAX)):
                place = self._dice.randrange(FIRST_BYTE, path.stat().st_size)
                with path.open("rb") as file:
                    file.seek(place)
                    byte = file.read(1)[0]
                overwrite(path, place, bytes([byte ^ 1 << self._dice.randrange(8)]))

    def tear_pages(self) -> None:
        """Leave a page of some drives half as it was before it was written."""
        self._tell("tear_pages", "tears pages")
        for path in drive_files(self._pod.files):
            for _ in range(self._dice.randrange(FLIPS_MAX)):
                page = self._dice.randrange(FIRST_BYTE, path.stat().st_size) // PAGE * PAGE
                torn = 512 * self._dice.randrange(1, PAGE // 512)
                overwrite(path, page + torn, bytes(PAGE - torn))

    def fill_disk(self) -> None:
        """Have one agent find its disk full."""
        if (each := self._agent()) is None:
            return
        pid = each.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._dice.randrange(FIRST_BYTE, 64 * MIB), hard))

        def make_room() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))

        self._begin(
            "fill_disk", f"has {each.name} find its disk full", self._dice.uniform(0.2, 2.0), make_room
        )

    def _cut(self, deed: str, host: Host, name: str, others: Sequence[Host], what: str) -> None:
        network = self._pod.network
        assert network is not None
        way = self._dice.choice(tuple(Way))
        links = network.cut(host, others, way)
        words = {
            Way.BOTH: f"cuts {name} from {what}",
            Way.THERE: f"loses what {name} sends to {what}",
            Way.BACK: f"loses what {what} send to {name}",
        }[way]
        self._begin(deed, words, self._lasting(), lambda: network.join(links))

    def _agent(self) -> Guarded | None:
        """Choose an agent that runs; two are always left running where there are more than that."""
        free = [each for each in self._pod.agents if each.name not in self._held]
        left = min(2, len(self._pod.agents) - 1)
        return self._dice.choice(free) if len(free) > left else None

    def _member(self) -> Node | None:
        return self._dice.choice(self._pod.etcd.nodes) if self._is_etcd_whole else None

    def _lasting(self) -> float:
        return self._dice.uniform(*self._dice.choices((BRIEF_S, SOME_S, LONG_S), (4, 5, 2))[0])

    def _hold(self, each: Guarded, does: str, lasts_s: float, end: Callable[[], None]) -> None:
        self._held.add(each.name)

        def let_go() -> None:
            self._held.discard(each.name)
            end()

        self._begin(f"{does} an agent", f"{does} {each.name}", lasts_s, let_go)

    def _hurt_etcd(self, deed: str, words: str, lasts_s: float, end: Callable[[], None]) -> None:
        self._is_etcd_whole = False

        def heal() -> None:
            self._is_etcd_whole = True
            end()

        self._begin(deed, words, lasts_s, heal)

    def _begin(self, deed: str, words: str, lasts_s: float, end: Callable[[], None]) -> None:
        self._tell(deed, f"{words} for {lasts_s:.1f} s")
        self._faults.append(Fault(words, time.monotonic() + lasts_s, end))

    def _tell(self, deed: str, words: str) -> None:
        self._pod.story.deeds[deed.replace("_", " ")] += 1
        self._pod.story.tell(words)

    def _end_what_is_over(self) -> None:
        now_s = time.monotonic()
        over = [fault for fault in self._faults if fault.until_s <= now_s]
        self._faults = [fault for fault in self._faults if fault.until_s > now_s]
        for fault in over:
            fault.end()
            self._pod.story.tell(f"  over: {fault.words}")
