"""What operators decide while agents run: a volume's switch under load, and settings; and what they ask."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest
from tests.support.pod.admin import Admin
from tests.support.pod.processes import Pod, until
from tests.support.pod.work import BLOCK_BYTES, BLOCKS, LAYOUT, content, hashes

from ostraca import Ack, BlockState, PutState, Reason
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.telemetry.status import AgentStatus, OverridesStatus

if TYPE_CHECKING:
    from types import TracebackType

    import ostraca

pytestmark = pytest.mark.slow

CHAINS = range(8)
OBEYED_WITHIN_S = 2.0
NAME = "switched"
PATH = f"/v1/volumes/default/{NAME}"
HIT = (BlockState.HIT, Reason.NONE)
OFF = (BlockState.DECLINED, Reason.SWITCHED_OFF)
SHADOWED = (BlockState.DECLINED, Reason.SHADOWED)
Outcome = tuple[BlockState, Reason]


class Load:
    """A worker that gets the same chains over and over, through one handle of the volume."""

    def __init__(self, client: ostraca.Client) -> None:
        self._volume = client.volume(NAME, LAYOUT, block_bytes=BLOCK_BYTES)
        self._seen: list[tuple[float, frozenset[Outcome]]] = []
        self._trouble = ""
        self._stop = threading.Event()
        self._worker = threading.Thread(target=self._run)

    def becomes(self, outcome: Outcome) -> None:
        """Wait until every block ends so, which must not take long; then see that it goes on."""
        began_s = time.monotonic()
        until(lambda: self._last() == {outcome}, f"{outcome}", within_s=OBEYED_WITHIN_S)
        assert time.monotonic() - began_s < OBEYED_WITHIN_S
        known = len(self._seen)
        until(lambda: len(self._seen) > known + 2 * len(CHAINS), "it goes on")
        assert set().union(*(outcomes for _, outcomes in self._seen[known:])) == {outcome}

    def _last(self) -> frozenset[Outcome]:
        """Every outcome of the last round."""
        return frozenset().union(*(outcomes for _, outcomes in self._seen[-len(CHAINS) :]))

    def _run(self) -> None:
        into = np.empty((BLOCKS, BLOCK_BYTES), np.uint8)
        try:
            while not self._stop.is_set():
                for seed in CHAINS:
                    into[:] = 0xEE
                    chain = self._volume.chain(hashes(seed))
                    result = self._volume.get(chain, into=into, deadline_s=2.0)
                    outcomes = frozenset(zip(result.states, result.reasons, strict=True))
                    is_hit = outcomes == {HIT}
                    assert np.array_equal(into, content(seed)) if is_hit else (into == 0xEE).all()
                    self._seen.append((time.monotonic(), outcomes))
        except (AssertionError, OstracaError) as error:
            self._trouble = repr(error)

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._worker.join()
        if error is None:
            assert not self._trouble, self._trouble


def hits_on_flash(pod: Pod) -> int:
    """How many blocks gets found on drives."""
    return sum(drive.hits for status in statuses(pod) for drive in status.drives)


def shadowed(pod: Pod, state: str) -> int:
    """How many blocks of gets would have ended so."""
    return sum(
        count.blocks
        for status in statuses(pod)
        for tally in status.operations
        if tally.operation == "shadow_get"
        for count in tally.blocks
        if count.state == state
    )


def test_a_switch_is_obeyed_under_load_within_two_seconds(pod: Pod) -> None:
    with Admin(pod) as admin, pod.agents[0].connect() as writer, pod.agents[1].connect() as reader:
        volume = writer.volume(NAME, LAYOUT, block_bytes=BLOCK_BYTES, create=True)

        def puts(chain: int) -> set[PutState]:
            its = volume.chain(hashes(chain))
            return set(volume.put(its, source=content(chain), ack=Ack.COMMITTED, deadline_s=5.0).states)

        def switch(to: str) -> None:
            answer = admin.ask("PUT", f"{PATH}/switch", {"switch": to}, who="oscar")
            assert (answer.status, answer.body["switch"]) == (200, to)

        assert set().union(*map(puts, CHAINS)) <= {PutState.COMMITTED, PutState.EXISTS}
        until(lambda: admin.ask("GET", PATH).status == 200, "the admin hears of the volume")
        with Load(reader) as load:
            load.becomes(HIT)
            switch("off")
            load.becomes(OFF)
            before = hits_on_flash(pod)
            load.becomes(OFF)
            assert hits_on_flash(pod) == before
            assert puts(1000) == {PutState.DECLINED}
            switch("shadow")
            load.becomes(SHADOWED)
            until(lambda: shadowed(pod, "HIT") > BLOCKS * len(CHAINS), "would-be hits are counted")
            assert hits_on_flash(pod) == before
            assert shadowed(pod, "MISS") == 0
            assert puts(1000) == {PutState.COMMITTED}, "it goes on being filled"
            switch("on")
            load.becomes(HIT)
        admin.stop()
    admin.check_log()


def test_settings_are_obeyed_and_taken_back_and_blocks_placed_while_agents_run(pod: Pod) -> None:
    with Admin(pod) as admin, pod.agents[0].connect() as client:
        volume = client.volume(NAME, LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        until(lambda: admin.ask("GET", PATH).status == 200, "the admin hears of the volume")

        def go_by(settings: dict[str, object]) -> None:
            assert admin.ask("PUT", "/v1/settings", settings).status == 200
            until(
                lambda: all(said.settings == settings for said in overrides(pod)),
                f"all go by {settings}",
                within_s=OBEYED_WITHIN_S,
            )

        go_by({"log_level": "debug", "requests_max": 7})
        agents = admin.ask("GET", "/v1/agents").body["items"]
        assert [each["settings"] for each in agents] == [{"log_level": "debug", "requests_max": 7}] * 3
        volume.lookup(volume.chain(hashes(0)), deadline_s=2.0)
        log = pod.agents[0].log
        until(lambda: "lookup of 2 blocks begins" in log.read_text(), "it logs every request")
        go_by({})
        until(lambda: log.read_text().rstrip().endswith("operators set the log level to its own setting"), "")
        root, other = (each.hex() for each in hashes(0))
        query = f"tenant=default&volume={NAME}&root={root}&hash={other}"
        (place,) = admin.ask("GET", f"/v1/placement?{query}", who="victor").body["places"]
        owners = {each["id"]: each["owner"] for each in admin.ask("GET", "/v1/shards").body["items"]}
        assert owners[place["shard"]] == place["owner"]
        form = {
            "tenant": "default",
            "volume": NAME,
            "agent": "agent-2",
            "chains": [{"engine_hashes": [root]}],
        }
        done = admin.ask("POST", "/v1/prefetch", form, who="oscar")
        declined = {"state": "DECLINED", "reason": "NO_SPACE", "blocks": 1}
        assert (done.status, done.body["counts"]) == (200, [declined]), "these agents have no cache"
        admin.stop()
    admin.check_log()


def statuses(pod: Pod) -> list[AgentStatus]:
    """Return the overrides known to all agents."""
    found = [agent.status() for agent in pod.agents]
    assert all(found)
    return [status for status in found if status is not None]


def overrides(pod: Pod) -> list[OverridesStatus]:
    """By what all agents go."""
    return [status.overrides for status in statuses(pod)]
