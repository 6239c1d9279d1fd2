"""Harness of the comparison with other stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.peers.client import StoreFailedError, running_client
from benchmarks.peers.environments import Surroundings
from benchmarks.peers.harness import Plan
from benchmarks.peers.outcome import Operation, Outcome, StoreRun, as_dict, medians_table, ratios_table
from benchmarks.peers.picture import draw
from benchmarks.peers.stores.plain_files import PlainFiles
from benchmarks.peers.stores.turns import Turns, block_memory
from rich.console import Console

ROOT = Path(__file__).parents[3]
LITTLE = {"OSTRACA_AGENT_MEMORY_STAGING_BYTES": "128MiB"}
BATCH = Operation("get_batch", "get 2 × 1 GB", batch_bytes=2_000_000_000)
CALL = Operation("look_up", "look-up of 8 keys")


def outcome() -> Outcome:
    ours = StoreRun("ostraca", "Ostraca", "shared memory", "1.0", is_ours=True)
    ours.seconds.update(get_batch=[1.0, 0.5, 2.0], look_up=[0.001, 0.002, 0.003])
    peer = StoreRun("redis", "Redis", "TCP", "7.0", is_ours=False)
    peer.seconds.update(get_batch=[4.0, 1.0, 4.0], look_up=[0.001, 0.001, 0.001])
    return Outcome((BATCH, CALL), (ours, peer), {"mooncake": "no wheel"})


@pytest.mark.slow
def test_a_short_run_measures_what_is_here_and_reports_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "benchmarks.peers", "--short", "redis", "files"]
    places = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "file")]
    done = subprocess.run(
        [*command, *places],
        cwd=ROOT,
        env=os.environ | LITTLE,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "these figures mean nothing" in done.stdout
    assert "redis is left out: `" in done.stderr
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    missing = {"redis"}
    if "ostraca is left out" in done.stderr:  # without NIXL
        missing |= {"ostraca", "ostraca-nixl"}
    assert set(found["missing"]) == missing
    assert {each["name"] for each in found["stores"]} == {
        "ostraca",
        "ostraca-nixl",
        "ostraca-tcp",
        "files",
    } - missing
    assert {len(values) for each in found["stores"] for values in each["seconds"].values()} == {2}
    assert (tmp_path / "out" / "peers.svg").read_text().count("page cache") == len(found["operations"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "memcached"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 2
    assert "no store is called memcached: name any of ostraca, ostraca-nixl, ostraca-tcp" in done.stderr


def test_figures_are_medians_and_ratios_are_medians_of_rounds() -> None:
    found = as_dict(outcome())
    assert [each["figures"] for each in found["stores"]] == [
        {
            "get_batch": {"median": 2.0, "min": 1.0, "max": 4.0},
            "look_up": {"median": 2000.0, "min": 1000.0, "max": 3000.0},
        },
        {
            "get_batch": {"median": 0.5, "min": 0.5, "max": 2.0},
            "look_up": {"median": 1000.0, "min": 1000.0, "max": 1000.0},
        },
    ]
    assert found["ratios"] == [{"ours": "ostraca", "peer": "redis", "get_batch": 2.0, "look_up": 0.5}]
    assert (found["missing"], found["failures"]) == ({"mooncake": "no wheel"}, {})


def test_tables_name_stores_and_transports() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(medians_table(outcome(), "Medians"), ratios_table(outcome()))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[3:5] == [
        ["Ostraca", "1.0", "shared", "memory", "2.00", "2,000"],
        ["Redis", "7.0", "TCP", "0.50", "1,000"],
    ]
    assert lines[-1] == ["shared", "memory", "Redis", "TCP", "2.00", "0.50"]


def test_the_picture_has_the_transport_on_every_bar(tmp_path: Path) -> None:
    draw(outcome(), tmp_path / "peers.svg")
    text = (tmp_path / "peers.svg").read_text()
    for words in ("2.00 · shared memory", "2,000 · shared memory", "0.50 · TCP", "1,000 · TCP"):
        assert text.count(f">{words}<") == 1
    draw(outcome(), tmp_path / "peers.svg")
    assert (tmp_path / "peers.svg").read_text() == text


def test_wrong_bytes_and_a_lost_key_are_noticed(tmp_path: Path) -> None:
    order = Plan.short().order(tmp_path, "")
    memory = block_memory(2 * order.blocks, order.block_bytes)
    with ThreadPoolExecutor(2) as threads:
        turns = Turns(PlainFiles(tmp_path, threads, 0), order, memory)
        keys = set(tmp_path.iterdir())
        assert len(keys) == order.keys // 2
        for put, get in ((turns.put_batch, turns.get_batch), (turns.put_one, turns.get_one)):
            assert len(put()) == len(get())
            put()
            for path in set(tmp_path.iterdir()) - keys:
                path.write_bytes(bytes(order.block_bytes))
            with pytest.raises(ValueError, match="wrong bytes"):
                get()
        assert len(turns.look_up()) == order.singles
        keys.pop().unlink()
        with pytest.raises(ValueError, match="the store has 8 of the keys and found"):
            turns.look_up()


def test_a_store_whose_client_has_ended_or_fails_is_told_apart(tmp_path: Path) -> None:
    order, log = Plan.short().order(tmp_path, ""), tmp_path / "log"
    with running_client("plain_files", Surroundings(), order, log) as (client, _):
        assert len(client.turn("put_one")) == order.singles
        client._process.kill()
        with pytest.raises(StoreFailedError, match="the client ended; its log is empty"):
            client.turn("get_one")
    missing = Plan.short().order(tmp_path / "none", "")
    with (
        pytest.raises(StoreFailedError, match="FileNotFoundError"),
        running_client("plain_files", Surroundings(), missing, log),
    ):
        pass
