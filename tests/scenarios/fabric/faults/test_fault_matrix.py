"""What docs/explanation/faults.md calls *processes*.

Agent and worker are stopped, killed and cut off, around and inside transfers. Each survivor goes on, hands
over no wrong byte, and gets its memory back.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.contract.network.sockets import cut_connection_to, cut_internet
from tests.support.fabric.fabric_host import MIB, FabricProcess
from tests.support.fabric.worker_host import BATCH, WorkerHost

import ostraca
from ostraca.settings import ClientSettings
from ostraca_fabric.telemetry.status import AgentStatus

pytestmark = pytest.mark.slow

LATE_S = 0.1
"""How far beyond its deadline an operation may end."""

SHAPE = ("--drives", "2", "--capacity", "520MiB")


TRANSPORTS = ("inline", "nixl", "pushed", "direct", "memory", "regions", "rows")
"""How blocks cross: *direct* workers read flash themselves. *memory* workers read the agent's cache, and the
agent reads their puts out of their memory. The rest crosses inline. With *regions*, blocks cross inline, too,
from and to rows of the worker's memory. Workers of *rows* read flash themselves, into such rows. For *pushed*
ones, the agent moves blocks over NIXL from and to such rows.
"""

MEMORIES = ("flash", "DRAM")
"""Where the agent has blocks: it loads them into staging, or finds them in its cache."""

OPERATIONS = ("get", "put")

EVERY_CELL = "OSTRACA_EVERY_CELL" in os.environ
"""Whether to go through the whole matrix, as `make soak` does, and not through its rows and columns only."""


def cells(*columns: Sequence[str], short: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    odd = {"direct", "DRAM"}, {"rows", "DRAM"}, {"memory", "flash"}
    every = [cell for cell in itertools.product(*columns) if not any(each <= {*cell} for each in odd)]
    return every if EVERY_CELL else list(short)


with_memory = pytest.mark.parametrize(
    ("transport", "memory", "operation"),
    cells(
        TRANSPORTS,
        MEMORIES,
        OPERATIONS,
        short=[
            ("inline", "DRAM", "get"),
            ("inline", "flash", "put"),
            ("nixl", "flash", "get"),
            ("pushed", "DRAM", "get"),
            ("pushed", "flash", "put"),
            ("direct", "flash", "get"),
            ("memory", "DRAM", "get"),
            ("memory", "DRAM", "put"),
            ("regions", "DRAM", "get"),
            ("regions", "flash", "put"),
            ("rows", "flash", "get"),
        ],
    ),
)
without_memory = pytest.mark.parametrize(
    ("transport", "operation"),
    cells(
        TRANSPORTS,
        OPERATIONS,
        short=[
            ("inline", "put"),
            ("nixl", "get"),
            ("pushed", "get"),
            ("direct", "get"),
            ("memory", "get"),
            ("memory", "put"),
            ("regions", "get"),
            ("regions", "put"),
            ("rows", "get"),
        ],
    ),
)
over_either = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(autouse=True)
def _needs_nixl(request: pytest.FixtureRequest) -> None:
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("transport", "nixl") in ("nixl", "pushed"):
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")


@contextmanager
def agent_of(directory: Path, transport: str, memory: str = "flash") -> Iterator[FabricProcess]:
    dram = "64MiB" if memory == "DRAM" or transport == "memory" else "0"
    carrier = {"memory": "inline", "regions": "inline", "pushed": "nixl"}.get(transport, transport)
    ways = ("inline", "--direct-reads", "default") if transport in ("direct", "rows") else (carrier,)
    with FabricProcess(directory / "fabric", *SHAPE, "--dram", dram, "--transport", *ways) as agent:
        yield agent
        assert agent.process is not None
        assert agent.process.poll() is None, "the agent goes on whatever befalls its workers"
        assert agent.stop() == 0
        agent.check_log()


ASKING = ClientSettings(arena_bytes=4 * MIB, chunk_bytes=4 * MIB, transports=("inline", "nixl"))


def until_status(agent: FabricProcess, is_so: Callable[[AgentStatus], bool]) -> AgentStatus:
    until_s = time.monotonic() + 15
    with ostraca.connect(agent.address, settings=ASKING) as client:
        while not is_so(status := client.status()):
            assert time.monotonic() < until_s, status
        return status


def at_rest(status: AgentStatus) -> bool:
    """Whether nothing of the agent's memory is on its way anywhere."""
    return status.staging_used_bytes == 0 and status.quarantined_bytes == 0


@with_memory
def test_a_worker_stopped_in_mid_operation_holds_nobody_up_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, transport: str, memory: str, operation: str
) -> None:
    with (
        agent_of(tmp_path, transport, memory) as agent,
        WorkerHost(agent.address, transport) as sleeper,
        WorkerHost(agent.address, transport) as other,
    ):
        sleeper.go(operation)
        sleeper.signal(signal.SIGSTOP)
        for _ in range(3):  # the agent's memory is used again meanwhile
            assert other.once("get").hits == BATCH
            assert other.once("put").outcomes == {"COMMITTED NONE"}
        sleeper.signal(signal.SIGCONT)
        assert sleeper.halt().wrong == 0
        sleeper.recovers()
        until_status(agent, at_rest)
        assert [sleeper.stop(), other.stop()] == [0, 0]


@with_memory
def test_a_worker_killed_in_mid_operation_leaves_nothing_behind_and_its_successor_starts_anew(
    tmp_path: Path, transport: str, memory: str, operation: str
) -> None:
    with agent_of(tmp_path, transport, memory) as agent:
        with WorkerHost(agent.address, transport) as doomed:
            doomed.go(operation)
            doomed.signal(signal.SIGKILL)
            doomed.process.join()
        until_status(agent, lambda status: at_rest(status) and status.workers == 1)
        with WorkerHost(agent.address, transport) as successor:
            assert successor.recovers().outcomes == {"HIT NONE"}
            assert successor.once("put").outcomes == {"COMMITTED NONE"}
            assert successor.stop() == 0


@without_memory
def test_an_agent_stopped_in_mid_operation_makes_its_worker_late_and_takes_nothing_back(
    tmp_path: Path, transport: str, operation: str
) -> None:
    with agent_of(tmp_path, transport) as agent, WorkerHost(agent.address, transport) as worker:
        worker.go(operation, 0.3)
        agent.signal(signal.SIGSTOP)
        worker.goes_on(3)  # operations end without the agent, and others take other slots
        agent.signal(signal.SIGCONT)
        worker.goes_on(3)
        seen = worker.halt()
        assert seen.wrong == 0
        assert seen.worst_late_s < LATE_S
        assert "LATE DEADLINE" in seen.outcomes
        worker.recovers()
        until_status(agent, at_rest)
        assert worker.stop() == 0


@over_either
def test_an_agent_that_was_given_up_as_it_had_stopped_takes_nothing_back_when_it_goes_on(
    tmp_path: Path, transport: str
) -> None:
    with agent_of(tmp_path, transport) as agent, WorkerHost(agent.address, transport) as worker:
        worker.go("get", 0.3)
        agent.signal(signal.SIGSTOP)
        until_s = time.monotonic() + 10
        while worker.once("put", 0.3).outcomes != {"DECLINED DISCONNECTED"}:
            assert time.monotonic() < until_s
        assert bool(worker.quarantined_bytes) == (transport in ("nixl", "pushed")), "what may be written yet"
        agent.signal(signal.SIGCONT)
        seen = worker.halt()
        assert seen.wrong == 0
        assert seen.worst_late_s < LATE_S
        worker.recovers()
        until_status(agent, at_rest)
        assert worker.stop() == 0


@without_memory
def test_an_agent_killed_in_mid_operation_is_found_again_by_the_same_worker(
    tmp_path: Path, transport: str, operation: str
) -> None:
    with agent_of(tmp_path, transport) as agent, WorkerHost(agent.address, transport) as worker:
        worker.go(operation, 0.3)
        agent.kill()
        worker.goes_on(3)
        agent.start()
        seen = worker.halt()
        assert seen.wrong == 0
        assert seen.worst_late_s < LATE_S
        worker.recovers()
        assert worker.once("put").outcomes == {"COMMITTED NONE"}
        assert worker.stop() == 0


@without_memory
def test_a_control_connection_cut_while_both_live_is_made_anew_and_all_memory_comes_back(
    tmp_path: Path, transport: str, operation: str
) -> None:
    with agent_of(tmp_path, transport) as agent, WorkerHost(agent.address, transport) as worker:
        path = agent.address.removeprefix("unix://")
        worker.go(operation)
        for _ in range(3):
            while not cut_connection_to(worker.pid, path):
                worker.goes_on(1)
            worker.goes_on(2)
        seen = worker.halt()
        assert seen.wrong == 0
        assert seen.worst_late_s < LATE_S
        worker.recovers()
        until_status(agent, at_rest)
        assert worker.stop() == 0


@over_either
def test_slots_that_a_cut_connection_left_in_doubt_come_back_by_the_word_of_the_same_agent(
    tmp_path: Path, transport: str
) -> None:
    with agent_of(tmp_path, transport) as agent, WorkerHost(agent.address, transport) as worker:
        agent.signal(signal.SIGSTOP)
        assert worker.once("get", 0.1).outcomes == {"LATE DEADLINE"}
        assert worker.quarantined_bytes > 0
        assert cut_connection_to(worker.pid, agent.address.removeprefix("unix://")) == 1
        agent.signal(signal.SIGCONT)
        worker.recovers()
        assert worker.stop() == 0


@pytest.mark.nixl
def test_slots_left_with_an_agent_that_was_out_of_reach_come_back_when_it_answers_again(
    tmp_path: Path,
) -> None:
    shape = ("--agents", "2", "--dram", "0", "--transport", "nixl")
    with FabricProcess(tmp_path / "fabric", *SHAPE, *shape) as agents:
        first, second = (tmp_path / "fabric" / f"agent-{number}.sock" for number in range(2))
        with WorkerHost([f"unix://{first}", f"unix://{second}"], "nixl") as worker:
            agents.signal(signal.SIGSTOP)
            assert worker.once("get", 0.1).outcomes == {"LATE DEADLINE"}
            hidden = first.rename(first.with_suffix(".hidden"))
            assert cut_connection_to(worker.pid, str(first)) == 1
            agents.signal(signal.SIGCONT)
            until_s = time.monotonic() + 10
            while worker.once("get").hits < BATCH:
                assert time.monotonic() < until_s
            assert worker.quarantined_bytes > 0, "another agent's word says nothing about them"
            hidden.rename(first)
            while worker.quarantined_bytes:
                assert time.monotonic() < until_s + 10
            assert worker.stop() == 0
        assert agents.stop() == 0
        agents.check_log()


@pytest.mark.nixl
@pytest.mark.parametrize("operation", OPERATIONS if EVERY_CELL else ["put"])
def test_a_broken_data_plane_makes_both_ends_connect_anew(tmp_path: Path, operation: str) -> None:
    with agent_of(tmp_path, "nixl") as agent, WorkerHost(agent.address, "nixl") as worker:
        worker.go(operation)
        assert cut_internet(worker.pid) > 0
        worker.goes_on(3)
        seen = worker.halt()
        assert seen.wrong == 0
        assert seen.worst_late_s < LATE_S
        worker.recovers()
        assert worker.stop() == 0


@pytest.mark.nixl
@pytest.mark.parametrize("operation", OPERATIONS if EVERY_CELL else ["put"])
def test_where_nixl_has_tcp_alone_blocks_cross_inline_and_a_dying_agent_kills_no_worker(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with FabricProcess(tmp_path / "fabric", *SHAPE, "--dram", "0") as agent:
        with WorkerHost(agent.address, "nixl,inline") as worker:
            assert worker.transport == "inline"
            worker.go(operation)
            worker.signal(signal.SIGSTOP)
            agent.kill()
            worker.signal(signal.SIGCONT)
            worker.goes_on(2)
            agent.start()
            assert worker.halt().wrong == 0
            worker.recovers()
            assert worker.stop() == 0
        agent.check_log()


@over_either
def test_at_the_limit_of_quarantine_a_worker_is_declined_until_its_agent_goes_on(
    tmp_path: Path, transport: str
) -> None:
    with (
        agent_of(tmp_path, transport) as agent,
        WorkerHost(agent.address, transport, quarantine_bytes_max=MIB) as worker,
    ):
        agent.signal(signal.SIGSTOP)
        assert worker.once("get", 0.1).outcomes == {"LATE DEADLINE"}
        assert worker.quarantined_bytes >= MIB, "by a single get: after more, the agent is given up"
        for operation in ("get", "put"):
            assert worker.once(operation, 5.0).outcomes == {"DECLINED QUARANTINED"}
        agent.signal(signal.SIGCONT)
        worker.recovers()
        assert worker.once("put").outcomes == {"COMMITTED NONE"}
        assert worker.stop() == 0


@pytest.mark.parametrize(("transport", "memory"), [("inline", "flash"), ("inline", "DRAM")])
def test_what_a_stopped_worker_holds_of_its_agent_is_told_and_comes_back(
    tmp_path: Path, transport: str, memory: str
) -> None:
    """Inline: through shared memory a transfer needs no worker, so one that has stopped holds nothing."""
    with agent_of(tmp_path, transport, memory) as agent, WorkerHost(agent.address, transport) as sleeper:
        sleeper.go("get", 0.2)
        held = stopped_in_mid_transfer(agent, sleeper)
        assert (held.quarantined_cached_bytes > 0) == (memory == "DRAM")
        sleeper.signal(signal.SIGCONT)
        assert sleeper.halt().wrong == 0
        sleeper.recovers()
        until_status(agent, lambda status: at_rest(status) and not status.quarantined_cached_bytes)
        assert sleeper.stop() == 0


def test_an_agent_that_ends_in_order_while_a_worker_has_stopped_under_a_transfer_ends_well(
    tmp_path: Path,
) -> None:
    shape = ("--dram", "0", "--transport", "inline")
    with FabricProcess(tmp_path / "fabric", *SHAPE, *shape) as agent:
        with WorkerHost(agent.address, "inline") as sleeper:
            sleeper.go("get", 0.2)
            stopped_in_mid_transfer(agent, sleeper)
            assert agent.stop() == 0
            sleeper.signal(signal.SIGCONT)
            assert sleeper.halt().wrong == 0
            assert sleeper.stop() == 0
        agent.check_log()


def stopped_in_mid_transfer(agent: FabricProcess, worker: WorkerHost) -> AgentStatus:
    """Stop a worker, again and again until it was in mid transfer, and its get's deadline has passed."""
    with ostraca.connect(agent.address, settings=ASKING) as client:
        for _ in range(100):
            worker.signal(signal.SIGSTOP)
            until_s = time.monotonic() + 0.4
            while time.monotonic() < until_s:
                status = client.status()
                if status.quarantined_bytes + status.quarantined_cached_bytes:
                    return status
            worker.signal(signal.SIGCONT)
            worker.goes_on(1)
    raise AssertionError("the worker is never in mid transfer")
