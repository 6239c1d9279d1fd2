"""What becomes of blocks, gets and puts when agents or etcd die, stop and come back. Real processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.support.pod.meanwhile import Meanwhile
from tests.support.pod.processes import GRANT_S, TTL_S, Pod, until
from tests.support.pod.work import (
    CHAINS,
    await_puts,
    declined,
    empty,
    hashes,
    missing,
    put,
    put_all,
    volume_of,
)

from ostraca import Reason

pytestmark = pytest.mark.slow

SOON_S = 6.0
"""How long after its lease has ended an owner's blocks may still be missed, and puts go on after the grant,
on a machine that does other things as well. How long it takes, `benchmarks/fabric/shard_takeover_time.py`
measures.
"""

MORE = range(100, 112)

MISSED_SHARE_MAX = 0.02
"""Of the gets of a worker while three agents are restarted one after the other. It is without an agent twice,
for as long as it takes to connect to another."""


def test_blocks_of_an_agent_that_was_killed_are_back_soon_after_its_lease_has_ended(pod: Pod) -> None:
    with pod.agents[0].connect() as writer:
        assert put(writer) == list(CHAINS)
    dying = pod.owner()
    reader_at = next(agent for agent in pod.agents if agent is not dying)
    with reader_at.connect() as client:
        missing(client)  # it knows the volume
        dying.kill()
        took_s = until(lambda: not missing(client, deadline_s=0.5), "every block can be got again")
        assert took_s < TTL_S + SOON_S
        await_puts(client)
        assert put(client, MORE) == list(MORE)
        assert missing(client) == []


def test_an_owner_that_was_stopped_beyond_its_lease_writes_over_nothing_and_comes_back(pod: Pod) -> None:
    with pod.agents[0].connect() as writer:
        assert put(writer) == list(CHAINS)
    stopped = pod.owner()
    other = next(agent for agent in pod.agents if agent is not stopped)
    with stopped.connect() as there, other.connect() as here:
        assert missing(there) == []
        stopped.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        until(lambda: stopped.name not in pod.claims().values(), "its claims end")
        until(lambda: not missing(here, deadline_s=0.5), "every block can be got again")
        await_puts(here)
        until(
            lambda: time.monotonic() > stopped_s + 1.5 * GRANT_S, "it was stopped for long enough to say so"
        )
        written = put(here, range(200, 212))
        assert written == list(range(200, 212)), "the successors write"
        stopped.signal(signal.SIGCONT)
        written += put(there, range(300, 312))  # at the one that was stopped, whatever it makes of them
        pod.await_settled()
        assert missing(here, (*CHAINS, *written)) == []
        assert missing(there, (*CHAINS, *written)) == []
    look = stopped.status()
    assert look is not None
    assert "must join again" in stopped.log.read_text()
    assert f"{stopped.name} was suspended for " in stopped.log.read_text()


FROZEN = """\
import os
import time
from ostraca_dpu_agent.controller.controller import AgentController

observe = AgentController.observe

def freeze_where_asked(self):
    while os.path.exists(os.environ["PLANTED_FREEZE"]):
        time.sleep(0.05)
    return observe(self)

AgentController.observe = freeze_where_asked
"""
"""What has an agent's event loop stand still while there is a file. Its other threads run."""


def test_an_agent_whose_event_loop_stands_still_gives_up_its_shards_and_comes_back(
    own: Pod, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FROZEN)
    asked = tmp_path / "freeze"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PLANTED_FREEZE": str(asked)}
    own.create()
    frozen, other = own.agent("agent-0", environment=environment), own.agent("agent-1")
    own.start()
    assert frozen.name in own.claims().values()
    with other.connect() as here:
        assert put(here) == list(CHAINS)
        asked.touch()
        until(lambda: set(own.claims().values()) == {other.name}, "its claims end, and the other has them")
        until(lambda: not missing(here, deadline_s=0.5), "every block can be got again")
        await_puts(here)
        written = put(here, range(200, 212))
        assert written == list(range(200, 212)), "the successor writes"
        asked.unlink()
        until(lambda: frozen.name in own.claims().values(), "it has joined again, and serves shards")
        own.await_settled()
        assert missing(here, (*CHAINS, *written)) == []
    said = frozen.log.read_text()
    assert "the serving event loop has been blocked for" in said
    assert "must join again" in said
    own.check_logs()


STOPPED_S = 4.0
"""For how long a worker may miss what it asks for at an agent that has stopped: two deadlines, a Ping's
patience, and what others of the machine take."""


def test_a_worker_whose_agent_is_stopped_goes_on_at_another_one(pod: Pod) -> None:
    with pod.agents[0].connect() as writer:
        assert put(writer) == list(CHAINS)
    stopped = next(agent for agent in pod.agents if agent is not pod.owner())
    with pod.connect(stopped) as client:
        assert missing(client) == []
        stopped.signal(signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            until(lambda: not missing(client, CHAINS[:1], deadline_s=0.3), "the next agent answers")
            assert time.monotonic() - began_s < STOPPED_S
            assert client.agent != stopped.name
            until(lambda: stopped.name not in pod.claims().values(), "its shards are others'")
            until(lambda: not missing(client, deadline_s=0.5), "every block can be got")
            await_puts(client)
            written = put(client, range(600, 612))
            assert written == list(range(600, 612))
        finally:
            stopped.signal(signal.SIGCONT)
        for _ in range(5):  # whatever it does late, no byte of it is taken for another
            missing(client, (*CHAINS, *written))
        pod.await_settled()
        assert missing(client, (*CHAINS, *written)) == []
        assert client.quarantined_bytes == 0


def test_a_worker_whose_only_agent_is_stopped_is_told_at_once_and_comes_back_with_it(pod: Pod) -> None:
    with pod.agents[0].connect() as client:
        put_all(client)
        volume = volume_of(client)
        chain = volume.chain(hashes(0))

        def reasons(deadline_s: float) -> set[Reason]:
            return set(volume.get(chain, into=empty(), deadline_s=deadline_s).reasons)

        pod.agents[0].signal(signal.SIGSTOP)
        try:
            until(lambda: reasons(0.3) == {Reason.DISCONNECTED}, "it is given up", within_s=STOPPED_S)
            began_s = time.monotonic()
            while time.monotonic() - began_s < STOPPED_S / 4:
                assert reasons(10 * STOPPED_S) == {Reason.DISCONNECTED}
            assert time.monotonic() - began_s < STOPPED_S, "nobody waits out a deadline"
        finally:
            pod.agents[0].signal(signal.SIGCONT)
        until(lambda: reasons(1.0) == {Reason.NONE}, "its worker finds it again")
        pod.await_settled()
        # It may hold others off for a moment: what it had asked them was not answered while it stood still.
        until(lambda: not missing(client), "all blocks are found")


def test_without_etcd_gets_go_on_and_puts_for_as_long_as_was_granted(pod: Pod) -> None:
    pod.await_settled()
    with pod.agents[0].connect() as client:
        put_all(client)
        pod.etcd.kill()
        try:
            killed_s = time.monotonic()
            assert put(client, range(400, 404)) == list(range(400, 404)), "puts go on"
            fresh = iter(range(1000, 100_000, 24))
            until(
                lambda: set(declined(client, range(first := next(fresh), first + 24))) == {Reason.FENCED},
                "puts are declined",
            )
            assert time.monotonic() - killed_s < GRANT_S + SOON_S
            assert missing(client, (*CHAINS, *range(400, 404))) == [], "gets go on"
        finally:
            pod.etcd.start()
        await_puts(client)
        assert missing(client, (*CHAINS, *range(400, 404))) == []


class Reading(Meanwhile):
    """A worker that gets the same blocks over and over, and counts what it missed."""

    def __init__(self, pod: Pod) -> None:
        super().__init__()
        self.gets = 0
        self.missed = 0
        self.reasons: Counter[Reason | None] = Counter()
        self._pod = pod

    def work(self) -> None:
        with self._pod.connect() as client:
            while self.goes_on():
                self.missed += len(missing(client, reasons=self.reasons))
                self.gets += len(CHAINS)


def test_agents_restarted_one_after_the_other_lose_no_block(pod: Pod) -> None:
    with pod.connect() as writer:
        assert put(writer) == list(CHAINS)
        with Reading(pod) as reading:
            for number, agent in enumerate(pod.agents):
                agent.stop()
                pod.start()
                chains = range(500 + 10 * number, 510 + 10 * number)
                await_puts(writer)
                assert put(writer, chains) == list(chains)
        assert missing(writer) == []
        assert missing(writer, range(500, 530)) == []
    assert set(reading.reasons) <= {Reason.DISCONNECTED, Reason.NO_OWNER}, "at the worker's own agent alone"
    assert reading.missed <= MISSED_SHARE_MAX * reading.gets
