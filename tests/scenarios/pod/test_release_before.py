"""Agents, workers and commands of the release before beside today's, in one fabric. Real processes."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from tests.fabric.membership.nodes import skip
from tests.support.history import NoRevisionError, has_all_history
from tests.support.pod.meanwhile import Meanwhile
from tests.support.pod.processes import Pod, command, until
from tests.support.pod.release_before import (
    KNOWN_TRACEBACK,
    VARIABLE,
    Release,
    release_before,
)
from tests.support.pod.work import CHAINS, await_puts, missing, put_all
from tests.support.pod.workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fabric.membership.nodes import Cluster
    from tests.support.pod.processes import AgentProcess

pytestmark = pytest.mark.slow

MISSED_SHARE_MAX = 0.05
"""Of the gets of workers while three agents are replaced one after the other. A worker is without an agent
for as long as it takes to connect to another."""

SOME = 12
"""Chains that a worker gets at once while agents are replaced: enough that each agent owns some."""

FEW = 6
"""Chains that show that puts go on."""


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    try:
        return release_before(tmp_path_factory.mktemp("release-before"))
    except NoRevisionError as why:
        if VARIABLE in os.environ:
            raise
        if not has_all_history():
            pytest.skip(str(why))
        skip(str(why))


@pytest.fixture(scope="module")
def both(etcd: Cluster, before: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    """Return a fabric created by the release before, with an agent of either release."""
    with Pod(tmp_path_factory.mktemp("both"), etcd, prefix="/ostraca/both/") as both:
        both.create(environment=before.environment)
        both.agent("of-before", environment=before.environment)
        both.agent("of-today")
        yield both


@pytest.fixture
def pod(both: Pod) -> Iterator[Pod]:
    """Start both agents of that fabric."""
    both.start()
    with both.connect() as client:
        await_puts(client)
    yield both
    both.check_logs(known=KNOWN_TRACEBACK)


def worker(pod: Pod, *agents: AgentProcess, release: Release | None) -> WorkerProcess:
    """Start a worker that knows these agents."""
    return WorkerProcess(
        pod.folder / f"worker-{'today' if release is None else 'before'}.log",
        *(agent.address for agent in agents),
        environment=None if release is None else release.environment,
    )


def test_workers_and_agents_of_either_release_give_what_any_of_them_put(pod: Pod, before: Release) -> None:
    assert len(set(pod.claims().values())) == len(pod.agents), "both own shards"
    with ExitStack() as open_workers:
        workers = [
            open_workers.enter_context(worker(pod, agent, release=release))
            for agent in pod.agents
            for release in (before, None)
        ]
        written = []
        for number, each in enumerate(workers):
            chains = list(range(100 * number, 100 * number + SOME))
            assert each.put(chains) == chains
            written += chains
        for each in workers:
            assert each.not_found(written) == []
            assert each.missing(written) == []


def test_commands_of_either_release_show_agents_of_either(pod: Pod, before: Release) -> None:
    for environment in (before.environment, None):
        for agent in pod.agents:
            shown = command(
                *("status", agent.address, "--tokens", pod.files / "tokens.toml"), environment=environment
            )
            assert shown.returncode == 0, shown.stderr
            assert all(each.name in shown.stdout for each in pod.agents), shown.stdout


@pytest.mark.parametrize("dying", ["of-before", "of-today"])
def test_an_agent_that_was_killed_is_succeeded_by_one_of_the_other_release(
    pod: Pod, before: Release, dying: str
) -> None:
    (killed,) = (agent for agent in pod.agents if agent.name == dying)
    (other,) = (agent for agent in pod.agents if agent.name != dying)
    with worker(pod, other, release=before) as old, worker(pod, other, release=None) as new:
        chains = list(CHAINS)
        assert old.put(chains) == chains
        assert killed.name in pod.claims().values(), "some of these blocks are in its shards"
        killed.kill()
        until(lambda: set(pod.claims().values()) == {other.name}, "the other one claims its shards")
        until(lambda: not new.missing(chains), "every block can be got again")
        with pod.connect(other) as client:
            await_puts(client)
        more = list(range(1000, 1024))
        assert new.put(more) == more
        pod.start()  # the one that was killed again, which takes shards over in order
        for each in (old, new):
            assert each.missing([*chains, *more]) == []


class Traffic(Meanwhile):
    """Workers that put new blocks and get old ones, in turn, until this is left."""

    def __init__(self, *workers: WorkerProcess) -> None:
        super().__init__()
        self.committed: list[int] = []
        self.gets = 0
        self.missed = 0
        self._workers = itertools.cycle(itertools.permutations(workers, 2))
        self._chains = itertools.count(10_000)

    def await_puts(self) -> None:
        """Wait until blocks are committed that were put from now on."""
        so_far = len(self.committed)
        until(lambda: self.has_failed or len(self.committed) >= so_far + FEW, "puts go on")

    def work(self) -> None:
        while self.goes_on():
            writer, reader = next(self._workers)
            self.committed += writer.put([next(self._chains)])
            wanted = self.committed[-SOME:]
            self.missed += len(reader.missing(wanted))
            self.gets += len(wanted)


def test_agents_upgraded_one_after_the_other_under_load_lose_no_block_nor_does_one_put_back(
    own: Pod, before: Release
) -> None:
    own.create(environment=before.environment)
    for number in range(3):
        own.agent(f"agent-{number}", environment=before.environment)
    own.start()
    upgrades = [(agent, None) for agent in own.agents]
    put_back = (own.agents[-1], before.environment)
    with worker(own, *own.agents, release=before) as old, worker(own, *own.agents, release=None) as new:
        with Traffic(old, new) as traffic:
            traffic.await_puts()
            for agent, environment in (*upgrades, put_back):
                agent.stop()
                agent.environment = environment
                own.start()
                traffic.await_puts()
        assert traffic.missed <= MISSED_SHARE_MAX * traffic.gets, (old.reasons, new.reasons)
    for agent, release in zip(own.agents, (before, None, None), strict=True):
        with worker(own, agent, release=release) as reader:
            assert reader.missing(traffic.committed) == []
    own.check_logs(known=KNOWN_TRACEBACK)


def test_what_was_rebuilt_is_claimed_by_this_release_first_and_by_the_one_before_once_that_has_waited(
    own: Pod, before: Release
) -> None:
    """Nobody knows what was granted, and the release before has no word for that: it claims nothing."""
    own.create(environment=before.environment)
    old = own.agent("of-before", environment=before.environment)
    own.start()
    with own.connect(old) as client:
        await_puts(client)
        put_all(client)
        own.etcd.ctl("del", "--prefix", own.prefix)
        assert command("fabric", "rebuild", *own.where, "--files", own.files).returncode == 0
        refuses = "a record in etcd has version 2, and this release reads 1 and older"
        until(lambda: refuses in old.log.read_text(), "it says that it can't")
        assert own.claims() == {}
        new = own.agent("of-today")
        new.launch()
        new.await_ready()
        until(lambda: list(own.claims().values()) == 4 * [new.name], "this release claims all of it")
    with own.connect(new) as client:
        until(lambda: not missing(client), "every block can be got again")
        await_puts(client)
    new.stop()
    until(lambda: list(own.claims().values()) == 4 * [old.name], "the one before claims all of it again")
    with own.connect(old) as client:
        until(lambda: not missing(client), "its blocks are got there")
    own.check_logs(known=KNOWN_TRACEBACK)
