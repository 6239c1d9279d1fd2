"""Wrong configurations of the vLLM tier: a line in the engine's log, and an engine that serves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sdk.connectors.engine_steps import IDENTITY, EngineSteps, prompt
from tests.sdk.scripted_agent import ScriptedAgent, agent_at

from ostraca.connectors.vllm.core.lookup_table import ChunkState
from ostraca.connectors.vllm.settings import LOGGER
from ostraca.connectors.vllm.tier import read_settings
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX

KEYS = prompt(4)
WITHOUT = "Ostraca: the engine serves without the tier: "
NOT_YET = "Ostraca: no fabric yet, the engine goes on without: "


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with agent_at(tmp_path / "agent.sock") as started:
        yield started


def entry(agent: ScriptedAgent, **changes: object) -> dict[str, object]:
    plain = {"agents": agent.address, "arena_bytes": 32 << 20, "connect_retry_s": 0.01}
    return plain | {"transports": ["inline"]} | changes


def check_that_the_engine_serves(engine: EngineSteps) -> None:
    engine.begin("a", KEYS)
    assert engine.ask("a", KEYS) == [ChunkState.MISSING] * len(KEYS)
    assert engine.store("a", KEYS).failed == tuple(KEYS)
    assert engine.load("a", KEYS, first_row=100).failed == tuple(KEYS)
    engine.tier.drain()
    engine.tier.end_request("a")
    assert not engine.tier.is_linked
    assert not engine.tier.has_work


@pytest.mark.parametrize(
    ("changes", "block_bytes", "words"),
    [
        ({"agents": "http://host:1"}, 4096, "http://host:1"),
        ({"load_deadline": 1}, 4096, "no setting 'load_deadline'; did you mean load_deadline_s?"),
        ({"load_deadline_s": "1"}, 4096, "load_deadline_s"),
        ({}, BLOCK_BYTES_MAX + 1, "lower blocks_per_chunk or block_size"),
        ({"weights_file": "/nowhere/index.json"}, 4096, "/nowhere/index.json can't be read"),
    ],
)
def test_a_wrong_entry_is_a_line_and_never_stops_the_engine(
    agent: ScriptedAgent,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    block_bytes: int,
    words: str,
) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        settings = read_settings(entry(agent, **changes), publishes_events=False)
        with EngineSteps(settings, identity=replace(IDENTITY, block_bytes=block_bytes)) as engine:
            assert len(caplog.messages) == 1
            (line,) = caplog.messages
            assert line.startswith(WITHOUT)
            assert words in line
            assert "\n" not in line
            check_that_the_engine_serves(engine)


def check_the_line_of_the_link(caplog: pytest.LogCaptureFixture, config: dict[str, Any], words: str) -> None:
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        EngineSteps(read_settings(config, publishes_events=False)) as engine,
    ):
        engine.until(lambda: words in caplog.text)
        check_that_the_engine_serves(engine)
    (line,) = [line for line in caplog.messages if words in line]
    assert line.startswith(NOT_YET)
    assert "\n" not in line


def test_an_address_without_an_agent_is_a_line(
    agent: ScriptedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    check_the_line_of_the_link(
        caplog, entry(agent, agents="unix:///nowhere/agent.sock"), "/nowhere/agent.sock: nothing is there"
    )


def test_a_wrong_token_is_a_line(
    agent: ScriptedAgent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent.let_in("right-token-12345")
    token = tmp_path / "token"
    token.write_text("wrong-token-12345")
    check_the_line_of_the_link(caplog, entry(agent, token_file=str(token)), "token")
    assert "wrong-token-12345" not in caplog.text


def test_a_missing_nixl_is_a_line(
    agent: ScriptedAgent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("nixl", "ostraca._memory.nixl_arena"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    check_the_line_of_the_link(caplog, entry(agent, transports=["nixl"]), "nixl")
