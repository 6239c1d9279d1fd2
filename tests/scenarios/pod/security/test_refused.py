"""What an agent is refused for, and what it waits for instead."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path

import pytest
from tests.support.pod.processes import AgentProcess, Pod, until
from tests.support.pod.work import missing, put

pytestmark = pytest.mark.slow

OTHER = "0" * 31 + "1"


def refusal(agent: AgentProcess, *more: str) -> str:
    """Start an agent that is not taken; return what it says."""
    said = agent.log.stat().st_size if agent.log.exists() else 0
    agent.launch(*more)
    assert agent.ended() != 0
    return agent.log.read_text()[said:]


def test_an_agent_of_another_fabric_prefix_or_key_is_refused_with_what_to_do(pod: Pod) -> None:
    stranger = pod.agent("stranger")
    try:
        fabric = pod.listed("meta")[0]["fabric"]
        said = refusal(stranger, "--fabric", OTHER)
        assert f"is {fabric}, and not {OTHER}: check the endpoints" in said
        said = refusal(stranger, "--prefix", "/ostraca/nobody/")
        assert "no fabric exists under /ostraca/nobody/" in said
        assert "ostraca fabric create" in said
        key = pod.folder / "other.key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o600)
        assert "has another fabric key" in refusal(stranger, "--fabric-key", str(key))
        assert "Traceback" not in stranger.log.read_text()
    finally:
        pod.agents.remove(stranger)


def test_a_second_agent_is_refused_on_one_state_directory_and_under_one_name(
    pod: Pod, tmp_path: Path
) -> None:
    first, claims = pod.agents[0], pod.claims()
    elsewhere = Pod(tmp_path, pod.etcd, prefix=pod.prefix)
    elsewhere.files = pod.files
    second = elsewhere.agent(first.name)
    state = pod.folder / f"state-{first.name}"
    assert "another daemon uses" in refusal(second, "--state-dir", str(state))
    said = refusal(second)
    assert f"the fabric already has an agent {first.name}, at tcp://127.0.0.1:" in said
    assert first.runs
    assert pod.claims() == claims, "nobody lost a claim"


def test_a_state_directory_keeps_to_the_fabric_it_joined(pod: Pod, own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    first, wrong = pod.agents[0], own.agent("agent-0")
    copied = own.folder / "state-agent-0"
    shutil.copytree(pod.folder / "state-agent-0", copied)
    fabric = json.loads((copied / "daemon.json").read_text())["fabric"]
    said = refusal(wrong)
    assert f"{copied} belongs to agent agent-0 in fabric {fabric}, not in " in said
    assert "give another directory for a new fabric" in said
    assert f"and not {fabric}: check the endpoints, the prefix" in refusal(wrong, "--fabric", fabric)
    said = refusal(wrong, "--prefix", "/ostraca/nobody/")
    assert f"fabric {fabric} is no longer under /ostraca/nobody/" in said
    assert "ostraca fabric rebuild --etcd" in said
    assert first.runs


def test_two_fabrics_on_one_etcd_do_not_see_each_other(pod: Pod, own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    other = own.agent("agent-0")  # of the same name as one of the other fabric
    own.start()
    with pod.agents[0].connect() as here, other.connect() as there:
        assert put(here, [9601]) == [9601]
        assert missing(there, [9601]) == [9601]
        assert put(there, [9602]) == [9602]
        assert missing(here, [9602]) == [9602]
    look = other.status()
    assert look is not None
    assert [agent for agent, _ in look.agents] == ["agent-0"]
    other.stop()
    own.check_logs()


def test_an_agent_waits_for_etcd_and_says_so(own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    agent = own.agent("agent-0")
    own.etcd.kill()
    try:
        agent.launch()
        until(lambda: "Cannot join the fabric yet, retrying" in agent.log.read_text(), "it says so")
        assert agent.runs
    finally:
        own.etcd.start()
    agent.await_ready()
    agent.stop()
    own.check_logs()
