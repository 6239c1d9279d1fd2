"""The pages of a fabric over HTTP, and what they say while it lives and dies."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
from tests.cli.commands.test_up import SMALL, interrupt, refused, up
from tests.support.fabric.fabric_host import FabricThread

from ostraca_cli.composition.embedded import EmbeddedFabric
from ostraca_cli.testing import small_plan
from ostraca_fabric.telemetry.conditions import is_ready


def read(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_a_fabric_serves_pages_where_it_is_told_to(tmp_path: Path) -> None:
    options = ("--http", "127.0.0.1:0", "--set", "http.fresh_s=0", "--agents", "2")
    with up(tmp_path, *SMALL, *options, "--log-format", "json") as (process, line):
        assert line.startswith("ready: ")
        assert process.stderr is not None
        said = next(words for words in process.stderr if "Pages are at" in words)
        (url,) = re.findall(r"http://\S+:\d+", json.loads(said)["message"])
        code, metrics = read(f"{url}/agents/agent-1/metrics")
        assert code == 200
        assert 'ostraca_agent_info{agent="agent-1"' in metrics
        assert 'ostraca_agent_condition{condition="ready"} 1\n' in metrics
        code, ready = read(f"{url}/agents/agent-0/readyz")
        assert (code, json.loads(ready)["is_ready"]) == (200, True)
        assert read(f"{url}/metrics")[0] == 404
        interrupt(process)


@pytest.mark.slow
def test_an_address_in_use_stops_the_fabric_again(tmp_path: Path) -> None:
    with up(tmp_path / "one", *SMALL, "--http", "127.0.0.1:0") as (process, _):
        assert process.stderr is not None
        said = next(words for words in process.stderr if "Pages are at" in words)
        (taken,) = re.findall(r"http://(\S+:\d+)", said)
        code, words = refused(tmp_path / "two", *SMALL, "--http", taken)
        assert code == 1
        assert "can't listen at" in words
        interrupt(process)


async def test_an_agent_that_is_being_stopped_is_not_ready(tmp_path: Path) -> None:
    fabric = EmbeddedFabric(small_plan(tmp_path))
    await fabric.start()
    (look,) = fabric.status_functions.values()
    assert is_ready(look().conditions)
    await fabric._agents[0].drain()
    assert not is_ready(look().conditions)
    await fabric.stop()
    assert not is_ready(look().conditions), "what pages still ask for while the process ends"


def test_conditions_cross_the_wire(tmp_path: Path) -> None:
    with FabricThread(small_plan(tmp_path)) as host, host.connect() as client:
        found = {each.name: each.is_true for each in client.status().conditions}
    assert found["ready"]
    assert found["drives_good"]
