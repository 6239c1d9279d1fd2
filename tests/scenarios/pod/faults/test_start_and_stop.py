"""What an agent says while it starts and stops, and what it is refused for before it joins."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.fabric.membership.nodes import PATIENCE, free_ports
from tests.support.pod.processes import AgentProcess, Pod, command, until

from ostraca_fabric.telemetry.conditions import Condition

pytestmark = pytest.mark.slow

PLANTED = """\
import os
from ostraca_dpu_agent.controller.controller import AgentController

observe = AgentController.observe

def crash_where_asked(self):
    if os.path.exists(os.environ["PLANTED_CRASH"]):
        raise RuntimeError("planted")
    return observe(self)

AgentController.observe = crash_where_asked
"""
"""What has an agent's controller crash once there is a file."""


@pytest.fixture
def begun(own: Pod) -> Pod:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    return own


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen as a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


class Pages:
    """An agent's pages, as whoever looks after it asks for them."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self.options = ("--http", f"127.0.0.1:{port}", "--set", "http.fresh_s=0.01")
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, str]:
        """Return a page's code, 0 where nobody answers, and what it says."""
        try:
            with urllib.request.urlopen(f"{self._url}{path}", timeout=10) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def ready(self) -> tuple[int, str]:
        """Return the code of ``/readyz``, and its sentence on that."""
        code, said = self.get("/readyz")
        if not code:
            return code, said
        return code, _conditions(said)["ready"].sentence

    def conditions(self) -> dict[str, Condition]:
        """Return the conditions by their names."""
        return _conditions(self.get("/readyz")[1])


def _conditions(said: str) -> dict[str, Condition]:
    found = msgspec.convert(json.loads(said)["conditions"], list[Condition])
    return {each.name: each for each in found}


def heard(manager: socket.socket, *words: str) -> None:
    """Wait until the manager was told all of these in one message."""
    while not all(word in manager.recv(4096).decode() for word in words):
        pass


def test_an_agent_without_etcd_says_on_its_pages_what_it_waits_for_and_what_it_ends(
    begun: Pod, manager: socket.socket
) -> None:
    pages = Pages()
    environment = {**os.environ, "NOTIFY_SOCKET": str(manager.getsockname())}
    agent = begun.agent("agent-0", *pages.options, environment=environment)
    begun.etcd.kill()
    try:
        agent.launch()
        until(lambda: "Waiting for etcd, to join the fabric: " in pages.ready()[1], "it says so")
        told = pages.conditions()
        assert told["membership_answers"].sentence.startswith(
            "The membership store does not answer, and the agent has no map: "
        )
        assert told["membership_answers"].since_s > 0, "it was looked at before anybody asked"
        assert told["map_current"].sentence == "The agent has no map yet and serves nothing."
        assert pages.ready()[0] == 503
        assert pages.ready()[1].startswith("Not ready: starting. Waiting for etcd")
        assert pages.get("/healthz") == (200, "ok\n")
        code, metrics = pages.get("/metrics")
        assert code == 200
        assert 'ostraca_agent_condition{condition="ready"} 0\n' in metrics
        assert 'ostraca_agent_condition{condition="membership_answers"} 0\n' in metrics
        code, status = pages.get("/status")
        assert (code, json.loads(status)["agent"], json.loads(status)["shards"]) == (200, "agent-0", [])
        heard(manager, "STATUS=Not ready: starting", "Waiting for etcd", "EXTEND_TIMEOUT_USEC=30000000")
    finally:
        begun.etcd.start()
    agent.await_ready()
    assert pages.ready() == (200, "Ready: serving gets.")
    begun.etcd.nodes[0].pause()
    try:
        agent.signal(signal.SIGTERM)
        until(lambda: pages.ready()[1].startswith("Not ready: stopping. "), "so")
        assert pages.ready()[0] == 503
        assert pages.get("/healthz") == (200, "ok\n")
        heard(manager, "STATUS=Not ready: stopping", "EXTEND_TIMEOUT_USEC=")
        assert agent.ended() == 0
    finally:
        begun.etcd.resume()
    begun.check_logs()


@pytest.mark.parametrize("flag", ["--http", "--listen"])
def test_an_agent_whose_address_is_taken_says_so_and_never_joins(begun: Pod, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        agent = begun.agent("agent-0", flag, place if flag == "--http" else f"tcp://{place}")
        agent.launch()
        assert agent.ended() == 1
    assert (
        f"can't listen at tcp://{place}: the address is in use; end the other listener"
        in agent.log.read_text()
    )
    assert_never_joined(begun, agent)


@pytest.mark.parametrize("place", ["foo", "0.0.0.0:99999"])
def test_an_agent_whose_address_is_none_says_so_and_never_joins(begun: Pod, place: str) -> None:
    agent = begun.agent("agent-0", "--http", place)
    agent.launch()
    assert agent.ended() == 2
    assert f"{place!r} is no address for HTTP: write host:port" in agent.log.read_text()
    assert_never_joined(begun, agent)


def assert_never_joined(pod: Pod, agent: AgentProcess) -> None:
    assert pod.listed("agents/") == []
    assert pod.epochs() == {}, "no shard was ever claimed"
    assert not (pod.folder / f"{agent.name}.sock").exists()


def test_an_agent_that_stops_waits_for_an_etcd_that_is_away_only_once(own: Pod) -> None:
    own.create()
    first, second = (
        own.agent(name, "--set", "etcd.operation_timeout_s=4") for name in ("agent-0", "agent-1")
    )
    own.start()
    said = len(first.log.read_text())
    own.etcd.nodes[0].pause()
    try:
        began_s = time.monotonic()
        first.signal(signal.SIGTERM)
        assert first.ended() == 0
        took_s = time.monotonic() - began_s
    finally:
        own.etcd.resume()
    assert took_s < 8 * PATIENCE, first.log.read_text()[said:]
    own.await_settled()
    assert set(own.claims().values()) == {second.name}, "the end of its lease has said the rest"
    own.check_logs()


def test_commands_that_ask_agents_over_tcp_say_that_they_want_a_token_and_take_the_file(own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    first, second = own.agent("agent-0"), own.agent("agent-1")
    own.start()
    tokens = ("--tokens", own.files / "tokens.toml")
    without, given = command("status", first.address), command("status", first.address, *tokens)
    wanted = f"agent-1: no answer from {second.reached_at}: a fabric token is required: give --tokens FILE"
    assert (without.returncode, wanted in without.stdout) == (1, True), without.stdout
    assert (given.returncode, "no answer" in given.stdout) == (0, False)
    assert "enclosure-0/drive-0/0" in given.stdout, "names are whole where nobody looks on"
    assert command("metrics", second.reached_at).returncode == 1
    assert "ostraca_agent_uptime_seconds" in command("metrics", second.reached_at, *tokens).stdout
    explain = ("explain", "ab" * 32, "--volume", "none", "--agent", second.reached_at)
    assert "needs a token" in command(*explain).stderr
    assert "token" not in command(*explain, *tokens).stderr


def test_an_agent_of_which_a_part_has_crashed_ends_in_order_and_is_started_anew(
    begun: Pod, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    asked = tmp_path / "crash"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    agent = begun.agent(
        "agent-0", environment={**os.environ, "PYTHONPATH": path, "PLANTED_CRASH": str(asked)}
    )
    agent.launch()
    agent.await_ready()
    asked.touch()
    assert agent.ended() == 1
    said = agent.log.read_text()
    assert "a task of agent agent-0 crashed; this is a bug in Ostraca" in said
    assert "shutting down in order, for a restart" in said
    assert "Stopped." in said
    asked.unlink()
    agent.launch()
    agent.await_ready()
    agent.stop()
