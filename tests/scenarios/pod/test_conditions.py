"""What agents say by themselves of what keeps them from each other, and from drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.pod.processes import command, until

if TYPE_CHECKING:
    from tests.support.pod.processes import AgentProcess, Pod

pytestmark = pytest.mark.slow


def untrue(agent: AgentProcess) -> dict[str, str]:
    """Return the agent's conditions that report trouble."""
    status = agent.status()
    return {each.name: each.sentence for each in status.conditions if not each.is_true} if status else {}


def test_an_agent_with_another_fabrics_tokens_hears_it_from_the_others(own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    tokens = own.folder / "other.toml"
    tokens.write_text('fabric = ["of-another-fabric-0123456789"]\n')
    tokens.chmod(0o600)
    good, stranger = own.agent("agent-0"), own.agent("agent-1", "--tokens", str(tokens))
    own.start(good)
    stranger.launch()
    stranger.await_ready()
    for agent, other in ((stranger, good), (good, stranger)):
        until(lambda: "peers_reachable" in untrue(agent), f"{agent.name} hears that it is refused")  # noqa: B023
        words = untrue(agent)["peers_reachable"]
        assert words.startswith(f"Agents that refuse this agent: {other.name} (")
        assert "the token is not valid for the role agent" in words
        assert "Give all agents of the fabric the same token file" in words


def test_a_drive_that_is_not_there_is_named_with_its_shards_and_the_command_fails(own: Pod) -> None:
    own.create(enclosures=1, drives=2, capacity="34MiB")
    agent = own.agent("agent-0")
    own.start()
    agent.stop()
    (gone,) = own.files.glob("**/drive-1*")
    gone.rename(gone.with_name("elsewhere"))
    agent.launch()
    agent.await_ready()
    until(lambda: "shards_served" in untrue(agent), "nobody serves the other drive's shard")
    words = untrue(agent)
    assert "drive-1.img is missing: put the drive back" in words["shards_served"]
    assert "enclosure-0/drive-1 can't be used" in words["drives_good"]
    told = command("status", agent.address)
    assert told.returncode == 1
    assert "ostraca: 1 shard not served by any agent: enclosure-0/drive-1/0" in told.stderr
    assert "none – – – – unserved" in " ".join(told.stdout.split())
