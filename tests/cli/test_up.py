"""`ostraca up` as its users have it: a process, a line, a signal."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ostraca
from ostraca.cli.program import main
from ostraca_fabric.status import AgentStatus

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = (
    *("--capacity", "384MiB", "--dram", "64MiB", "--transport", "inline"),
    *("--set", "memory.staging_bytes=64MiB"),
)
LAYOUT = ostraca.Layout(model="test@1", dtype="bytes", page_tokens=16)


@contextmanager
def up(directory: Path, *options: str, by: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `ostraca up` meanwhile, *by* a command that becomes it; yields it and its ready line.

    It must have been ended within.
    """
    command = [*by, sys.executable, "-m", "ostraca.cli", "up", "--dir", str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
            assert process.wait(30) is not None
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Press Ctrl-C; return the exit code, and what was said on stdout and stderr since."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def refused(directory: Path, *options: str) -> tuple[int, str]:
    """Start `ostraca up` where it can't; return the exit code and the last line of stderr."""
    command = [sys.executable, "-m", "ostraca.cli", "up", "--dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


def test_the_ready_line_says_how_to_connect_and_to_what(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, "--agents", "2", "--enclosures", "2", "--drives", "1") as (process, line):
        addresses = ", ".join(f'"unix://{tmp_path}/agent-{number}.sock"' for number in range(2))
        assert line == (
            f"ready: ostraca.connect([{addresses}])  "
            "# 2 agents, 2 enclosures, 2 drives, 384.0 MiB, 0 blocks found\n"
        )
        assert interrupt(process)[:2] == (0, "")


def test_workers_connect_over_tcp_with_the_token_that_the_directory_keeps(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, "--listen", "tcp://127.0.0.1:0") as (process, line):
        address = re.findall(r'"(tcp://[^"]+)"', line)[0]
        with pytest.raises(ostraca.AuthenticationError):
            ostraca.connect(address)
        token = (tmp_path / "worker.token").read_text().strip()
        assert (tmp_path / "worker.token").stat().st_mode & 0o777 == 0o600
        settings = ostraca.ClientSettings(transports=("inline",))
        with ostraca.connect(address, credentials=token, settings=settings) as client:
            volume = client.volume("kv", LAYOUT, block_bytes=4096, create=True)
            chain, memory = volume.chain([secrets.token_bytes(32)]), np.zeros((1, 4096), np.uint8)
            source = np.ones((1, 4096), np.uint8)
            put = volume.put(chain, source=source, deadline_s=20, ack=ostraca.Ack.COMMITTED)
            assert put.accepted == 1
            assert volume.get(chain, into=memory, deadline_s=20).hits == 1
        with pytest.raises(ostraca.AuthenticationError):
            ostraca.connect(address, credentials=token, tenant="another")
        interrupt(process)
    with up(tmp_path, *SMALL, "--listen", "tcp://127.0.0.1:0") as (process, _):
        assert (tmp_path / "worker.token").read_text().strip() == token
        interrupt(process)


def test_an_address_to_listen_at_that_is_not_tcp_is_bad_usage(tmp_path: Path) -> None:
    code, said = refused(tmp_path / "new", *SMALL, "--listen", "unix:///tmp/x.sock")
    assert code == 2
    assert "tcp://host:port" in said


def test_status_shows_a_fabric_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with up(tmp_path, *SMALL, "--agents", "2") as (process, _):
        assert main(["status", "--dir", str(tmp_path), "--json"]) == 0
        decoded = msgspec.json.decode(capsys.readouterr().out)
        agents = msgspec.convert(decoded["agents"], tuple[AgentStatus, ...])
        assert [agent.agent for agent in agents] == ["agent-0", "agent-1"]
        assert sum(len(agent.shards) for agent in agents) == 2
        assert decoded["silent"] == []
        assert main(["status", f"unix://{tmp_path}/agent-1.sock"]) == 0
        shown = capsys.readouterr().out
        assert "agent-0: I serve" in shown
        assert "agent-1: I serve" in shown
        interrupt(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert said.splitlines()[-1] == f"Stopped. The blocks stay in {tmp_path}."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_also_when_it_was_started_where_interrupts_are_ignored(
    tmp_path: Path, number: signal.Signals
) -> None:
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with up(tmp_path, *SMALL, by=(sys.executable, "-c", ignoring)) as (process, _):
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert said.splitlines()[-1] == f"Stopped. The blocks stay in {tmp_path}."


def test_started_again_it_finds_the_blocks(tmp_path: Path) -> None:
    hashes = [secrets.token_bytes(32) for _ in range(8)]
    stored = np.random.default_rng(7).integers(0, 256, (8, MIB), np.uint8)
    with up(tmp_path, *SMALL) as (process, line):
        with ostraca.connect(_address(line)) as client:
            volume = client.volume("v", LAYOUT, block_bytes=MIB, create=True)
            put = volume.put(volume.chain(hashes), source=stored, deadline_s=10, ack=ostraca.Ack.COMMITTED)
            assert put.states == (ostraca.PutState.COMMITTED,) * 8
        interrupt(process)
    with up(tmp_path, *SMALL) as (process, line):
        assert line.endswith(", 8 blocks found\n")
        with ostraca.connect(_address(line)) as client:
            volume = client.volume("v", LAYOUT, block_bytes=MIB)
            got = np.zeros_like(stored)
            assert volume.get(volume.chain(hashes), into=got, deadline_s=10).hits == 8
            assert np.array_equal(got, stored)
        interrupt(process)


def test_a_staged_put_is_on_flash_after_an_orderly_stop(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, line):
        with ostraca.connect(_address(line)) as client:
            volume = client.volume("v", LAYOUT, block_bytes=MIB, create=True)
            chain = volume.chain(secrets.token_bytes(32) for _ in range(8))
            put = volume.put(chain, source=np.ones((8, MIB), np.uint8), deadline_s=10)
            assert put.accepted == 8
        interrupt(process)
    with up(tmp_path, *SMALL) as (process, line):
        assert line.endswith(", 8 blocks found\n")
        interrupt(process)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        code, said = refused(tmp_path, *SMALL)
        assert (code, said) == (
            1,
            f"ostraca: another process runs a fabric in {tmp_path}: stop it, or take another --dir",
        )
        assert interrupt(process)[0] == 0


def test_a_fabric_of_another_shape_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        interrupt(process)
    code, said = refused(tmp_path, *SMALL, "--drives", "4")
    assert code == 1
    assert "holds a fabric of 1 enclosure with 2 drives" in said
    assert "begin anew in another --dir" in said


def test_too_little_disk_is_one_sentence(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--capacity", "30TiB")
    assert code == 1
    assert re.search(r"drives take \d+ bytes, and .* has \d+ to spare: take a smaller capacity", said)


def test_too_small_a_capacity_is_bad_usage(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--capacity", "1MiB")
    assert code == 2
    assert said.endswith("(--capacity is 1.0 MiB for 2 drives)")


def test_a_directory_too_deep_for_sockets_is_bad_usage_and_stays_empty(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    code, said = refused(deep, *SMALL)
    assert code == 2
    assert "is too long: Linux allows 107 bytes" in said
    assert not deep.exists()


def test_a_fabric_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    with up(tmp_path, *SMALL) as (process, line):
        assert line.startswith("ready: ")
        assert interrupt(process)[0] == 0


def test_watching_goes_on_until_ctrl_c_which_is_code_130(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        command = [sys.executable, "-m", "ostraca.cli", "status", "--dir", str(tmp_path), "--json", "--watch"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            seen = 0
            for line in watching.stdout:
                seen += line == "}\n"
                if seen == 2:
                    break
            code, _, said = interrupt(watching)
        assert (code, said) == (130, "")
        assert interrupt(process)[0] == 0


def _address(line: str) -> str:
    found = re.search(r'"(unix://[^"]+)"', line)
    assert found is not None
    return found[1]


def test_a_rating_gives_the_drives_a_write_budget(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, "--dwpd", "0.5") as (process, line):
        address = re.findall(r'"(unix://[^"]+)"', line)[0]
        with ostraca.connect(address) as client:
            budgets = [shard.budget_bytes_per_day for shard in client.status().shards]
        assert budgets == [96 * MIB] * 2
        assert interrupt(process)[0] == 0
    for wrong in ("-1", "one", "nan", "inf"):
        code, words = refused(tmp_path, "--dwpd", wrong)
        assert code == 2
        assert "is no rating: write drive writes per day" in words


def test_settings_reach_the_agents_from_file_environment_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.toml").write_text('[owner]\nblocks_per_shard_max = 2048\nhold_s = "20s"\n')
    monkeypatch.setenv("OSTRACA_AGENT_MEMORY_CACHE_BYTES", "64MiB")
    options = ("--capacity", "384MiB", "--transport", "inline", "--settings", str(tmp_path / "agent.toml"))
    with up(tmp_path / "f", *options, "--set", "owner.endurance.rated_dwpd=0.5") as (process, line):
        with ostraca.connect(_address(line)) as client:
            status = client.status()
        assert {shard.blocks_max for shard in status.shards} == {2048}
        assert {shard.budget_bytes_per_day for shard in status.shards} == {96 * MIB}
        assert status.cache_bytes == 64 * MIB
        assert interrupt(process)[0] == 0


def test_settings_in_effect_are_printed_with_where_they_come_from_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["up", "--dir", str(tmp_path / "new"), "--print-settings", "--dwpd", "0.5", "--agents", "2"]
    assert main([*argv, "--set", "owner.hold_s=20"]) == 0
    shown = capsys.readouterr().out
    assert "# From --set; the default is 30.0.\nhold_s = 20.0\n" in shown
    assert "# From --dwpd; the default is 0.0.\nrated_dwpd = 0.5\n" in shown
    assert '# The default is "512MiB".\ncache_bytes = "256MiB"\n' in shown
    assert not (tmp_path / "new").exists()
    (tmp_path / "shown.toml").write_text(shown)
    assert main([*argv[:-4], "--agents", "2", "--settings", str(tmp_path / "shown.toml")]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if " = " in line] == [
        line for line in shown.splitlines() if " = " in line
    ]


def test_wrong_settings_are_bad_usage_and_all_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ostraca.cli", "up", "--dir", str(tmp_path / "new")]
    command += ["--set", "owner.hold=1", "--set", "events_max=some"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ostraca: 2 things are wrong with the settings:",
        "  --set owner.hold=1: there is no setting owner.hold; the nearest is owner.hold_s",
        "  --set: events_max: 'some' can't be its value: write a whole number of 0 or more",
    ]
    assert not (tmp_path / "new").exists()


def test_a_token_that_is_replaced_lets_in_at_once_and_the_old_one_no_more(tmp_path: Path) -> None:
    options = ("--listen", "tcp://127.0.0.1:0", "--set", "secrets_look_s=0.05")
    with up(tmp_path, *SMALL, *options) as (process, line):
        address = re.findall(r'"(tcp://[^"]+)"', line)[0]
        file, old, new = tmp_path / "worker.token", (tmp_path / "worker.token").read_text().strip(), "n" * 32
        settings = ostraca.ClientSettings(transports=("inline",))
        with ostraca.connect(address, credentials=old, settings=settings):
            (tmp_path / "next").write_text(new)
            (tmp_path / "next").rename(file)
            assert process.stderr is not None
            assert any("was taken back" in words for words in process.stderr), "who was in is put out"
            assert any("were read again" in words for words in process.stderr)
            with pytest.raises(ostraca.AuthenticationError):
                ostraca.connect(address, credentials=old, settings=settings)
        with ostraca.connect(address, credentials=new, settings=settings) as client:
            assert client.status().agent == "agent-0"
        interrupt(process)


def test_the_service_manager_hears_when_it_is_ready_and_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "50000")
        with up(tmp_path / "f", *SMALL) as (process, line):
            heard = [manager.recv(4096).decode() for _ in range(5)]
            assert f"READY=1\nSTATUS={line.removeprefix('ready: ').strip()}" in heard
            assert heard.count("WATCHDOG=1") == 4
            interrupt(process)
            assert "STOPPING=1\nSTATUS=staged blocks go to flash" in iter(
                lambda: manager.recv(4096).decode(), ""
            )
