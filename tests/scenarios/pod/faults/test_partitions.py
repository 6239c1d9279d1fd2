"""What becomes of blocks, gets and puts when hosts can't reach each other.

Real processes: each agent, and etcd, is on a host of its own.
"""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
from tests.support.pod.hosts import SpreadPod
from tests.support.pod.network import Host, Network, Way
from tests.support.pod.processes import TTL_S, AgentProcess, await_hits, until
from tests.support.pod.work import (
    CHAINS,
    SMALL,
    await_puts,
    content,
    declined,
    empty,
    hashes,
    in_time,
    missing,
    put,
    put_all,
    volume_of,
)
from tests.support.pod.workers import WorkerProcess

import ostraca
from ostraca import Ack, Reason
from ostraca_fabric.connection import ConnectionSettings
from ostraca_fabric.connection.streams import tuned
from ostraca_fabric.sockets.stream import TCP_RTO_MAX_MS

pytestmark = pytest.mark.slow

AGENTS = 3
SOON_S = 0.3
"""A worker's deadline while somebody is cut off."""

UNREACHED = {Reason.NO_OWNER, Reason.DEADLINE}
"""Why blocks are missed whose owner can't be reached: that is found out by a deadline, and known then."""

BEST = "nixl" if find_spec("nixl_cu12") else "inline"
"""What blocks cross by on one host: NIXL where it is installed."""

GONE_ON_S = 4.0
"""For how long a worker may miss what it asks for at an agent that it is cut off from: two deadlines, a
Ping's patience, and what others of the machine take.
"""

APART_S, AGAIN_S = 4.0, 1.6
"""How long nothing passes between hosts, and how late what was sent meanwhile may be: were it sent again
after pauses that double, it would be 2.2 s late."""

ECHO = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    while sent := sock.recv(64):
        sock.sendall(sent)
"""

_begins = itertools.count(10_000, len(CHAINS))


def fresh() -> range:
    """Return chains that nobody has put."""
    return range(begin := next(_begins), begin + len(CHAINS))


@pytest.fixture(scope="module")
def spread(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadPod]:
    with SpreadPod(tmp_path_factory.mktemp("spread"), network) as spread:
        spread.create(enclosures=AGENTS, drives=1)
        for number in range(AGENTS):
            spread.add(f"agent-{number}", "--transport", "inline", transport="nixl")
        yield spread


@pytest.fixture
def pod(spread: SpreadPod) -> Iterator[SpreadPod]:
    """Start the agents with one shard each, put all chains, and leave all links whole."""
    spread.start()
    names = sorted(agent.name for agent in spread.agents)
    until(lambda: sorted(spread.claims().values()) == names, "shards are evenly spread")
    with spread.agents[0].connect() as client:
        await_puts(client)
        put_all(client)
    yield spread
    spread.check_logs()


def put_at_once(client: ostraca.Client, chains: range) -> list[int]:
    """Put chains side by side: one by one, those of others' shards would each take their whole deadline."""
    with ThreadPoolExecutor(8) as workers:
        done = workers.map(lambda seed: put(client, [seed], deadline_s=SOON_S), chains)
        return list(itertools.chain.from_iterable(done))


def await_peace(pod: SpreadPod, *written: int) -> None:
    """Wait until every agent gives all chains."""
    pod.await_settled()
    for agent in pod.agents:
        with agent.connect() as client:
            await_hits(client, (*CHAINS, *written))


def test_two_agents_cut_off_from_each_other_miss_each_other_s_blocks_and_no_shard_changes_hands(
    pod: SpreadPod,
) -> None:
    one, other, third = pod.agents
    epochs, claims = pod.epochs(), pod.claims()
    with pod.worker(one, transport=BEST) as here, other.connect() as there, third.connect() as between:
        assert here.missing(CHAINS) == []

        def are_apart() -> bool:
            """Whether each misses what the other one has, and does not wait for it any more."""
            here.reasons.clear()
            gone = here.missing(CHAINS, deadline_s=SOON_S)
            reasons = Counter[Reason | None](Reason[name] for name in here.reasons)
            also_gone = missing(there, deadline_s=SOON_S, reasons=reasons)
            new = fresh()
            done = here.put(new, deadline_s=SOON_S)
            put_there = declined(there, fresh(), deadline_s=SOON_S)
            assert set(reasons) <= {Reason.NONE, *UNREACHED}
            assert not set(gone) & set(also_gone)
            assert set(put_there) <= {None, Reason.NO_OWNER}
            assert missing(between) == []
            is_known = set(reasons) == {Reason.NO_OWNER}
            return is_known and bool(gone and also_gone) and 0 < len(done) < len(new) and len(put_there) == 2

        with pod.parted(one, other):
            began_s = time.monotonic()
            until(lambda: are_apart() and time.monotonic() > began_s + 1.25 * TTL_S, "they have given up")
        until(lambda: not here.missing(CHAINS, deadline_s=SOON_S), "the one reaches the other again")
        await_hits(there)
    assert (pod.epochs(), pod.claims()) == (epochs, claims)


def asked(volume: ostraca.Volume) -> set[Reason]:
    """Get a chain and put another one; return why blocks were missed and declined."""
    chain, new = volume.chain(hashes(CHAINS[0])), volume.chain(hashes(fresh()[0]))
    with in_time(SOON_S):
        got = volume.get(chain, into=empty(), deadline_s=SOON_S)
    with in_time(SOON_S):
        taken = volume.put(new, source=content(0), deadline_s=SOON_S, ack=Ack.COMMITTED)
    return {*got.reasons, *taken.reasons}


def test_a_worker_cut_off_from_its_agent_ends_in_time_and_goes_on_at_another(pod: SpreadPod) -> None:
    near, far, _ = pod.agents
    token = tomllib.loads((pod.files / "tokens.toml").read_text())["tokens"]["default"][0]

    def come(*agents: AgentProcess) -> ostraca.Client:
        return ostraca.connect([each.reached_at for each in agents], credentials=token, settings=SMALL)

    with come(near, far) as knows_two, come(near) as knows_one:
        assert missing(knows_two) == missing(knows_one) == []
        volume = volume_of(knows_one)
        with pod.parted(near, pod.network.operator):
            took_s = until(lambda: not missing(knows_two, CHAINS[:1], deadline_s=SOON_S), "it goes on")
            assert took_s < GONE_ON_S
            assert knows_two.agent == far.name
            written = fresh()
            assert put(knows_two, written) == list(written)
            assert asked(volume) <= {Reason.DEADLINE, Reason.DISCONNECTED}
            until(lambda: asked(volume) == {Reason.DISCONNECTED}, "it has given up its only agent")
        until(lambda: asked(volume) == {Reason.NONE}, "it finds its agent again")
        for client in (knows_one, knows_two):
            await_hits(client, (*CHAINS, *written))


def test_an_owner_cut_off_from_all_is_succeeded_and_fenced_and_comes_back(pod: SpreadPod) -> None:
    owner, *others = pod.agents
    began = len(owner.log.read_text())
    with owner.connect() as there, others[0].connect() as here, pod.parted(owner, pod.etcd_host):
        with pod.parted(owner, *others):
            written = put_at_once(there, fresh())
            assert written, "its own shard takes puts for as long as was granted"
            until(lambda: owner.name not in pod.claims().values(), "its claim ends with its lease")
            await_hits(here, (*CHAINS, *written))
            await_puts(here)
            more = fresh()
            assert put(here, more) == list(more)
            until(
                lambda: set(declined(there, fresh(), deadline_s=SOON_S)) == {Reason.FENCED, Reason.NO_OWNER},
                "its worker's puts are declined",
            )
            reasons: Counter[Reason | None] = Counter()
            gone = missing(there, deadline_s=SOON_S, reasons=reasons)
            assert 0 < len(gone) < len(CHAINS), "it goes on with what it has"
            assert set(reasons) == {Reason.NO_OWNER}
        await_hits(there)
        assert Reason.FENCED in declined(there, fresh()), "etcd has not said yet that it owns nothing"
    await_peace(pod, *written, *more)
    assert "must join again" in owner.log.read_text()[began:]


def test_agents_cut_off_from_etcd_one_way_go_on_with_gets_and_lose_their_shards(pod: SpreadPod) -> None:
    mute, deaf, well = pod.agents
    with mute.connect() as at_mute, deaf.connect() as at_deaf, well.connect() as at_well:
        with (
            pod.parted(mute, pod.etcd_host, way=Way.THERE),
            pod.parted(deaf, pod.etcd_host, way=Way.BACK),
        ):
            until(lambda: set(pod.claims().values()) == {well.name}, "the last one has every shard")
            for client in (at_mute, at_deaf, at_well):
                await_hits(client)
            await_puts(at_well)
            written = fresh()
            assert put(at_well, written) == list(written)
            for client in (at_mute, at_deaf):
                missing(client, written, deadline_s=SOON_S)  # as far as it knows, and no byte of it is wrong
                assert missing(client) == []
        await_peace(pod, *written)


def test_a_worker_that_its_agent_s_nixl_can_t_connect_to_holds_up_no_other_one(pod: SpreadPod) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    agent, away = pod.agents[0], pod.network.hosts[-1]
    began, log = len(agent.log.read_text()), pod.folder / "worker-away.log"
    with pod.worker(agent, transport="nixl") as near, pod.parted(agent, away):
        assert near.missing(CHAINS) == []

        def is_refused() -> bool:
            assert near.missing(CHAINS) == []
            return "memory was not reachable" in agent.log.read_text()[began:]

        # It comes by the agent's unix socket, which is on no network.
        with WorkerProcess(log, agent.address, transport="nixl,inline", place=away.place) as worker:
            until(is_refused, "the agent gives up what can't be connected to")
            until(lambda: worker.missing(CHAINS) == [], "its blocks cross inline")


@contextmanager
def echoing(host: Host) -> Iterator[tuple[str, int]]:
    """Have a process on a host say again what it is told, once; give its address."""
    command = [*host.before, sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield host.address, int(process.stdout.readline())
        finally:
            process.kill()


def test_what_was_sent_while_hosts_were_apart_arrives_within_a_second_of_their_being_joined(
    network: Network,
) -> None:
    host = network.hosts[-1]
    with echoing(host) as address, socket.create_connection(address) as sock:
        tuned(sock, ConnectionSettings())
        try:
            sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError as why:
            pytest.skip(f"Linux before 6.15: {why}")
        with network.parted(host, [network.operator]):
            sock.sendall(b"late")
            time.sleep(APART_S)
        began_s = time.monotonic()
        sock.settimeout(30.0)
        assert sock.recv(4) == b"late"
        assert time.monotonic() - began_s < AGAIN_S
