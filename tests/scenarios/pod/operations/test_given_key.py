"""A fabric as a Kubernetes release creates one: secrets exist first, and everything starts at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.support.pod.processes import Pod, command, until

from ostraca_fabric.tables.digests import FABRIC_KEY_BYTES

pytestmark = pytest.mark.slow

FABRIC_TOKEN = "the-token-of-the-fabric"


@pytest.fixture
def given(own: Pod) -> Pod:
    """Write the files of secrets that a fabric is to have."""
    own.files.mkdir()
    _write(own.files / "fabric.key", os.urandom(FABRIC_KEY_BYTES))
    _write(own.files / "tokens.toml", f'fabric = ["{FABRIC_TOKEN}"]\n'.encode())
    return own


def test_an_agent_that_starts_before_its_fabric_joins_once_the_fabric_is_created(given: Pod) -> None:
    agent = given.agent("agent-0", "--set", "etcd.awaits_fabric=true", "--set", "socket_mode=0666")
    agent.launch()
    until(lambda: "no fabric exists under" in agent.log.read_text(), "the agent has looked for its fabric")
    assert agent.runs
    created = _create(given)
    assert (created.returncode, created.stderr) == (0, "")
    assert f"created under {given.prefix}" in created.stdout
    agent.await_ready()
    assert Path(agent.address.removeprefix("unix://")).stat().st_mode & 0o777 == 0o666


def test_without_the_setting_an_agent_without_a_fabric_ends(given: Pod) -> None:
    agent = given.agent("agent-0")
    agent.launch()
    assert agent.ended() == 1
    assert "no fabric exists under" in agent.log.read_text()


def test_a_repetition_with_the_same_key_changes_nothing_and_another_key_is_refused(given: Pod) -> None:
    assert _create(given).returncode == 0
    before = given.listed("")
    again = _create(given)
    assert (again.returncode, f"found under {given.prefix}" in again.stdout) == (0, True)
    assert given.listed("") == before
    _write(given.files / "fabric.key", os.urandom(FABRIC_KEY_BYTES))
    other = _create(given)
    assert (other.returncode, "has another fabric key" in other.stderr) == (1, True)
    assert given.listed("") == before


def test_unusable_secrets_are_named_before_anything_is_created(given: Pod) -> None:
    _write(given.files / "tokens.toml", b"[tokens]\n")
    without = _create(given)
    assert (without.returncode, "has no fabric token" in without.stderr) == (1, True)
    _write(given.files / "fabric.key", b"short")
    short = _create(given)
    assert (short.returncode, "has 5 bytes, and a fabric key has 32" in short.stderr) == (1, True)
    alone = command("fabric", "create", *given.where, "--fabric-key", given.files / "fabric.key")
    assert (alone.returncode, "give --tokens FILE" in alone.stderr) == (2, True)
    assert given.listed("") == []


def test_the_command_waits_for_etcd(given: Pod) -> None:
    away = ("--etcd", "127.0.0.1:1", "--prefix", given.prefix)
    refused = command("fabric", "create", *away, *_secrets(given), "--wait", "0.1")
    assert (refused.returncode, "127.0.0.1:1" in refused.stderr) == (1, True)
    assert _create(given, "--wait", "60").returncode == 0


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)


def _secrets(pod: Pod) -> tuple[str | Path, ...]:
    return ("--fabric-key", pod.files / "fabric.key", "--tokens", pod.files / "tokens.toml")


def _create(pod: Pod, *more: str) -> subprocess.CompletedProcess[str]:
    return command("fabric", "create", *pod.where, *_secrets(pod), *more)
