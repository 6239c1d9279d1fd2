"""`ostraca replay` from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostraca_cli.program import main
from ostraca_cli.tools.replay.reports import report

DIGITS = 5000 * "9"
"""More digits than Python parses as an integer, and larger than any float."""

SMALL = ("--generate", "sessions=30,system_prompts=3,message_tokens=2000", "--segment-blocks", "2")
MORE = ("--generate", "sessions=60,system_prompts=3,message_tokens=2000", "--segment-blocks", "2")


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["replay", *options, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    found: dict[str, Any] = json.loads(shown.out)
    return found


def test_it_replays_what_it_generated_and_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *SMALL, "--capacity", "20%,100%", "--budget", "50%,3"]) == 0
    shown = capsys.readouterr().out
    assert "requests in" in shown
    assert "of all blocks" in shown
    for policy in (
        "ostraca ",
        "ostraca, budget 50%",
        "ostraca, budget 3",
        "lru",
        "s3-fifo",
        "sieve",
        "belady",
    ):
        assert shown.count(f"  {policy}") == 2


def test_a_trace_that_was_saved_gives_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.jsonl"
    plan = ("--capacity", "30%", "--segment-blocks", "2", "--policies", "ostraca,lru")
    first = run_json(capsys, *SMALL, *plan, "--save", str(path))
    again = run_json(capsys, str(path), *plan)
    for found in (first, again):
        for outcome in found["outcomes"]:
            del outcome["seconds"]
    assert first == again


def test_json_tells_trace_conditions_and_an_outcome_for_each_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run_json(capsys, *SMALL, "--capacity", "50%", "--budget", "50%", "--dwpd", "3", "--drive", "1TiB")
    assert set(found) == {"trace", "conditions", "outcomes", "losses"}
    assert found["losses"] == []
    assert found["conditions"]["block_bytes"] == 160 << 20
    assert found["conditions"]["capacities"] == [{"text": "50%", "size_bytes": 0, "share": 0.5}]
    by_policy = {outcome["policy"]: outcome for outcome in found["outcomes"]}
    assert list(by_policy) == ["ostraca", "ostraca, budget 50%", "lru", "s3-fifo", "sieve", "belady"]
    ours = by_policy["ostraca"]
    assert ours["hit_rate"] == ours["hits"] / found["trace"]["blocks"]
    assert 0 < ours["prefix_hit_rate"] <= ours["hit_rate"] <= by_policy["belady"]["hit_rate"]
    assert ours["bytes_written"] == sum(
        ours[f"{part}_bytes_written"] for part in ("block", "reinserted", "summary")
    )
    daily = ours["bytes_written"] / found["trace"]["span_s"] * 86_400
    assert ours["drive_writes_per_day"] == pytest.approx(daily / (1 << 40))
    assert ours["years_left"] == pytest.approx(3 * 5 / ours["drive_writes_per_day"])
    assert by_policy["ostraca, budget 50%"]["bytes_written"] < 0.8 * ours["bytes_written"]


def test_settings_of_an_owner_are_replayed_beside_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    plan = (*MORE, "--capacity", "40%", "--policies", "ostraca", "--budget", "50%")
    found = run_json(capsys, *plan, "--owner", "free_segments=9", "--owner", "ghost_bytes=4096,retry_s=1")
    assert [outcome["policy"] for outcome in found["outcomes"]] == [
        "ostraca",
        "ostraca, budget 50%",
        "ostraca, free_segments=9",
        "ostraca, free_segments=9, budget 50%",
        "ostraca, ghost_bytes=4096,retry_s=1",
        "ostraca, ghost_bytes=4096,retry_s=1, budget 50%",
    ]
    usual, _, spare, *_ = (outcome["hits"] for outcome in found["outcomes"])
    assert spare < usual


def test_the_loss_of_an_enclosure_is_told_for_each_size_of_stripe_units(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = (
        *SMALL,
        "--capacity",
        "30%,100%",
        "--policies",
        "lru",
        "--enclosures",
        "4",
        "--stripe-units",
        "1,4",
    )
    assert [loss["unit_blocks"] for loss in run_json(capsys, *plan)["losses"]] == [1, 4]
    assert main(["replay", *plan]) == 0
    shown = capsys.readouterr().out
    assert "after the failure of 1 of 4 enclosures half-way" in shown
    assert "4 hash ids" in shown


def test_time_that_passes_faster_wears_flash_faster(capsys: pytest.CaptureFixture[str]) -> None:
    plan = (*SMALL, "--capacity", "50%", "--policies", "lru")
    slow, fast = run_json(capsys, *plan), run_json(capsys, *plan, "--speed-up", "10")
    assert fast["outcomes"][0]["hits"] == slow["outcomes"][0]["hits"]
    wear = [found["outcomes"][0]["drive_writes_per_day"] for found in (slow, fast)]
    assert wear[1] == pytest.approx(10 * wear[0])


def test_outcomes_and_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    out = tmp_path / "out"
    printed = run_json(capsys, *SMALL, "--capacity", "20%,50%", "--budget", "50%", "--out", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["hits.svg", "outcomes.json", "writes.svg"]
    assert json.loads((out / "outcomes.json").read_text()) == printed
    for name in ("hits.svg", "writes.svg"):
        assert "belady" in (out / name).read_text()


def test_without_matplotlib_it_says_what_pictures_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda _name: None)
    assert main(["replay", *SMALL, "--capacity", "50%", "--policies", "lru", "--out", str(tmp_path)]) == 0
    assert "no pictures without matplotlib: install it with" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["outcomes.json"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "give either a TRACE to replay, or --generate"),
        (("trace", "--generate"), "give either a TRACE"),
        (("trace", "--save", "there"), "--save goes with --generate"),
        (("trace", "--capacity", "0%"), "--capacity: '0%' is no share"),
        (("trace", "--capacity", "lots"), "--capacity: 'lots' is no size"),
        (("trace", "--budget", "-1"), "--budget: '-1' is no write budget"),
        (
            ("trace", "--policies", "lru,random"),
            "--policies: 'random' is no policy: name any of ostraca, lru",
        ),
        (("trace", "--segment-blocks", "256"), "'256' is out of range: take 1 to 255"),
        (("trace", "--seed", "x"), "'x' is no number"),
        (("trace", "--enclosures", "1"), "'1' is out of range: take 2 to 1024"),
        (
            ("--generate", "--owner", "speed=3"),
            "'speed' is no setting of an owner: take any of adopt_every_s, blocks_per",
        ),
        (("--generate", "--owner", "retry_s=x"), "retry_s='x': write a number, as in retry_s=10.0"),
        (("trace", "--stripe-units", "1,0"), "--stripe-units: '0' is no count"),
        (("trace", "--speed-up", "0"), "'0' is out of range: take 1e-06 to 1e+06"),
        (("trace", "--speed-up", "1e-308"), "'1e-308' is out of range"),
        (("trace", "--years", "nan"), "'nan' is out of range"),
        (("trace", "--dwpd", "1e308"), "'1e308' is out of range"),
        (("trace", "--capacity", ""), "--capacity is empty"),
        (("trace", "--policies", ""), "--policies is empty"),
        (("trace", "--capacity", f"{DIGITS}%"), "is too much: write a share up to 1000000%"),
        (("trace", "--capacity", DIGITS), "is no size"),
        (("trace", "--budget", "1e308"), "'1e308' is no write budget"),
        (("trace", "--budget", f"{DIGITS}%"), "is too much"),
        (("trace", "--burst", "1e308"), "'1e308' is no time"),
        (("trace", "--block-bytes", "0"), "'0' is out of range: take 1 bytes to 1.0 TiB"),
        (("trace", "--block-bytes", "2TiB"), "'2TiB' is out of range"),
        (("trace", "--drive", "0"), "'0' is out of range"),
        (("trace", "--stripe-units", str(1 << 21)), "is out of range: take 1 to 1048576"),
        (("trace", "--stripe-units", DIGITS), "is no count"),
        (("trace", "--segment-blocks", DIGITS), "is no count"),
        (("trace", "--enclosures", DIGITS), "is no count"),
        (("trace", "--seed", DIGITS), "is no number"),
        (
            ("--generate", "sessions=5", "--capacity", "9000TiB", "--block-bytes", "64KiB"),
            "exceeds a shard",
        ),
        (("--generate", "--owner", "reinsertion_share=nan"), "reinsertion_share='nan' is out of bounds"),
        (
            ("--generate", "--owner", "ghost_bytes=99999999999999999"),
            "is out of bounds: write a number up to",
        ),
        (
            ("--generate", "sessions=3,system_tokens=1e8,system_prompts=1"),
            "no request was generated: let context_tokens_max be larger",
        ),
        (("nowhere.jsonl",), "nowhere.jsonl can't be read"),
        (("--generate", "turns=0"), "turns=0.0 can't be made"),
        (("--generate", "sessions=5", "--capacity", "1%"), "is less than 4 segments"),
    ],
)
def test_bad_usage_is_code_2_and_says_what_is_wrong(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *argv]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert DIGITS not in shown


def test_a_directory_that_can_not_be_made_is_said_before_the_replay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", *SMALL, "--out", "/proc/none"]) == 1
    assert capsys.readouterr().err == (
        "ostraca: /proc/none: nothing is there; check the path, or mount the disk\n"
    )
