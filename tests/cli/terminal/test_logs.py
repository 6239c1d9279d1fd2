"""Logs of daemons, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.cli.commands.test_up import LAYOUT, SMALL, interrupt, up

import ostraca
from ostraca_cli.terminal.logs import (
    JournalFormatter,
    JsonFormatter,
    StampedFormatter,
    add_log_options,
    is_journal,
    log_levels,
)
from ostraca_fabric.telemetry.requests import labelled


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("ostraca").makeRecord(
        "ostraca.test", logging.WARNING, "file.py", 1, message, arguments, None, extra=extra
    )


def written(of: logging.LogRecord, agent: str = "") -> dict[str, object]:
    line = JsonFormatter(agent).format(of)
    assert "\n" not in line
    decoded = json.loads(line)
    assert isinstance(decoded, dict)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", decoded.pop("time"))
    return decoded


def test_a_line_says_who_speaks_of_what_and_how_grave_it_is() -> None:
    assert written(record("%d of %d", 1, 2), "agent-7") == {
        "level": "warning",
        "logger": "ostraca.test",
        "message": "1 of 2",
        "agent": "agent-7",
    }


def test_a_request_is_told_by_its_label_and_extras_are_fields_of_their_own() -> None:
    with labelled("5eed1234/7"):
        found = written(record("two\nlines", shard="e/d/0", path=Path("/x"), message_bytes=7))
    assert found == {
        "level": "warning",
        "logger": "ostraca.test",
        "message": "two\nlines",
        "label": "5eed1234/7",
        "shard": "e/d/0",
        "path": "/x",
        "message_bytes": 7,
    }


def test_an_extra_never_stands_in_for_what_every_line_has() -> None:
    assert written(record("true", level="debug", logger="another"))["level"] == "warning"


def test_a_crash_comes_with_its_traceback_in_one_line() -> None:
    crashed = record("crashed")
    try:
        int("seven")
    except ValueError:
        crashed.exc_info = sys.exc_info()
    assert str(written(crashed)["exception"]).endswith("'seven'")


def test_arguments_that_do_not_fit_their_message_are_told_and_not_raised() -> None:
    assert "wrong arguments" in str(written(record("%d", "x"))["message"])


TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_a_daemons_line_of_text_begins_with_its_time_and_level() -> None:
    assert re.fullmatch(rf"{TIME} WARNING 1 of 2", StampedFormatter().format(record("%d of %d", 1, 2)))


def test_the_journal_is_told_the_level_of_each_line_and_no_time() -> None:
    assert JournalFormatter().format(record("one\ntwo")) == "<4>one\n<4>two"


def test_the_journal_is_known_by_what_it_reads(tmp_path: Path) -> None:
    with (tmp_path / "read").open("w") as read, (tmp_path / "other").open("w") as other:
        found = os.fstat(read.fileno())
        environment = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(environment, read.fileno())
        assert not is_journal(environment, other.fileno()), "it was sent elsewhere since"
        assert not is_journal({}, read.fileno())


def failed(tmp_path: Path, *options: str) -> str:
    """Run an agent without its key; return the output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ostraca_cli", "serve", "agent", "--id", "a", "--etcd", "127.0.0.1:1"),
            *("--state-dir", str(tmp_path / "state"), "--fabric-key", str(tmp_path / "none")),
            *("--listen", "tcp://127.0.0.1:1", *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
def test_why_a_daemon_ends_is_said_as_all_else_that_it_logs(tmp_path: Path) -> None:
    assert re.match(rf"{TIME} ERROR   ostraca: .*{tmp_path}/none", failed(tmp_path))
    line = json.loads(failed(tmp_path, "--log-format", "json"))
    assert (line["level"], line["agent"]) == ("error", "a")
    assert f"{tmp_path}/none" in line["message"]


@pytest.mark.slow
def test_settings_that_are_refused_are_told_as_json_where_logs_are(tmp_path: Path) -> None:
    line = json.loads(failed(tmp_path, "--log-format", "json", "--set", "turn_s=0"))
    assert (line["level"], line["message"][:13]) == ("error", "turn_s is 0.0")


def test_verbose_is_a_level() -> None:
    parser = argparse.ArgumentParser()
    add_log_options(parser)
    levels = [parser.parse_args(argv).log_level for argv in ([], ["-v"], ["--log-level", "error"])]
    assert levels == ["info", "debug", "error"]


@pytest.mark.slow
def test_a_fabrics_log_is_json_with_labels_and_without_its_secrets(tmp_path: Path) -> None:
    wrong = secrets.token_urlsafe(24)
    options = ("--log-format", "json", "--log-level", "debug", "--listen", "tcp://127.0.0.1:0")
    with up(tmp_path, *SMALL, *options) as (process, line):
        address = re.findall(r'"(tcp://[^"]+)"', line)[0]
        token, key = (tmp_path / "worker.token").read_text().strip(), (tmp_path / "fabric.key").read_bytes()
        with pytest.raises(ostraca.AuthenticationError):
            ostraca.connect(address, credentials=wrong)
        client_settings = ostraca.ClientSettings(transports=("inline",))
        with ostraca.connect(address, credentials=token, settings=client_settings) as client:
            volume = client.volume("kv", LAYOUT, block_bytes=4096, create=True)
            chain, source = volume.chain([secrets.token_bytes(32)]), np.ones((1, 4096), np.uint8)
            volume.put(chain, source=source, deadline_s=20, ack=ostraca.Ack.COMMITTED)
            worker = client.worker
        code, _, said = interrupt(process)
    assert code == 0
    lines = [json.loads(each) for each in said.splitlines()]
    assert {each["agent"] for each in lines} == {"agent-0"}
    assert any(each.get("label", "").startswith(f"{worker}/") for each in lines)
    assert {"debug", "info"} <= {each["level"] for each in lines}
    for secret in (wrong, token, key.hex(), repr(key)[2:-1]):
        assert secret not in said


@pytest.mark.slow
def test_with_several_agents_no_line_says_that_one_of_them_speaks(tmp_path: Path) -> None:
    options = ("--log-format", "json", "--log-level", "info", "--agents", "2")
    with up(tmp_path, *SMALL, *options) as (process, _):
        lines = [json.loads(each) for each in interrupt(process)[2].splitlines()]
    assert [each for each in lines if "agent" in each] == []


def test_what_is_logged_is_changed_and_brought_back_while_a_daemon_runs() -> None:
    ours, theirs = logging.getLogger("ostraca_dpu_agent"), logging.getLogger("asyncio")
    before = ours.level, theirs.level
    set_level = log_levels()
    set_level("debug")
    assert (ours.level, theirs.level) == (logging.DEBUG, before[1])
    set_level("error")
    assert not ours.isEnabledFor(logging.WARNING)
    set_level(None)
    assert (ours.level, theirs.level) == before
