"""What the SDK's tests share: an agent by script, and a client of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sdk.scripted_agent import ScriptedAgent, agent_at
from tests.sdk.shells import SHELLS

import ostraca

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
SOON_S = 0.3
"""A deadline that comes, but not before the agent was asked."""

LAYOUT = ostraca.Layout(model="test/model", dtype="bf16", page_tokens=16)
SETTINGS = ostraca.ClientSettings(
    arena_bytes=4 * MIB,
    chunk_bytes=MIB,
    transports=("inline",),
    quarantine_bytes_max=2 * MIB,
    batch_blocks_max=512,
    put_window_bytes=MIB,
    redial_s=0.01,
)


def hashes(count: int, seed: str = "prompt") -> list[bytes]:
    """Engine hashes of a prefix."""
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(count)]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with agent_at(tmp_path / "agent.sock") as running:
        yield running


@pytest.fixture
def client(agent: ScriptedAgent) -> Iterator[ostraca.Client]:
    with ostraca.connect(agent.address, settings=SETTINGS) as connected:
        yield connected


@pytest.fixture(params=sorted(SHELLS))
def volume(client: ostraca.Client, request: pytest.FixtureRequest) -> Iterator[ostraca.Volume]:
    """A volume, in each of the shells: whoever uses this is a behaviour of all three."""
    opened = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    with SHELLS[request.param](client, opened) as shell:
        yield shell
