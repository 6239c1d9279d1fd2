"""`ostraca up` as its users have it: a process, a line, a signal."""

import os
import re
import resource
import secrets
import shutil
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
from ostraca_cli.program import main
from ostraca_fabric.telemetry.status import AgentStatus

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
    command = [*by, sys.executable, "-m", "ostraca_cli", "up", "--dir", str(directory), *options]
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
    command = [sys.executable, "-m", "ostraca_cli", "up", "--dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[tuple[Sequence[str], Path]]:
    """Make a cgroup with this limit; yields a command that runs others in it, and the file of the limit.

    Skips where this machine lets us make none.
    """
    top = Path("/sys/fs/cgroup")
    is_v2 = (top / "cgroup.controllers").exists()
    where = (top if is_v2 else top / "memory") / f"ostraca-test-{secrets.token_hex(4)}"
    limit = where / ("memory.max" if is_v2 else "memory.limit_in_bytes")
    try:
        where.mkdir()
        limit.write_text(str(limit_bytes))
    except OSError as error:
        if where.exists():
            where.rmdir()
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield ("sh", "-c", f'echo $$ > {where}/cgroup.procs; exec "$@"', "sh"), limit
    finally:
        where.rmdir()


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
        assert "agent-0: serving" in shown
        assert "agent-1: serving" in shown
        interrupt(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert said.splitlines()[-1] == f"Stopped. Blocks stay in {tmp_path}."


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
        assert said.splitlines()[-1] == f"Stopped. Blocks stay in {tmp_path}."


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
            f"ostraca: another process runs a fabric in {tmp_path}: stop the process, or take another --dir",
        )
        assert interrupt(process)[0] == 0


def test_a_second_start_is_refused_whatever_was_removed_or_moved(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with up(first, *SMALL) as (process, _):
        for name in ("lock", "agent-0.sock"):
            (first / name).unlink()
        assert refused(first, *SMALL)[1].startswith("ostraca: another process runs a fabric in ")
        second.mkdir()
        for each in first.iterdir():
            each.rename(second / each.name)
        code, said = refused(second, *SMALL)
        drive = second / "enclosure-0" / "drive-0.img"
        assert (code, said.partition(",")[0]) == (1, f"ostraca: another process uses the drive {drive}")
        assert interrupt(process)[0] == 0


def test_a_fabric_of_another_shape_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        interrupt(process)
    code, said = refused(tmp_path, *SMALL, "--drives", "4")
    assert code == 1
    assert "holds a fabric of 1 enclosure with 2 drives" in said
    assert "create a new fabric in another --dir" in said


def test_too_little_disk_is_one_sentence(tmp_path: Path) -> None:
    code, said = refused(tmp_path, "--capacity", "30TiB")
    assert code == 1
    assert re.search(
        r"no room for 2 drives of \d+ bytes in .*: \d+ bytes are free, and 64 MiB of them stay free: "
        "choose a smaller capacity",
        said,
    )


@pytest.mark.parametrize("capacity", ["1", "30TiB", "900TiB"])
def test_a_start_refused_for_its_capacity_may_be_repeated(tmp_path: Path, capacity: str) -> None:
    refused(tmp_path, "--capacity", capacity)
    with up(tmp_path, *SMALL) as (process, line):
        assert line.startswith("ready: ")
        assert interrupt(process)[0] == 0


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


def test_watching_through_a_pipe_goes_on_until_ctrl_c_which_is_code_130(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ostraca_cli", "status", "--dir", str(tmp_path), "--watch"]
    with up(tmp_path, *SMALL) as (process, _):
        for options, last in ((["--json"], "}"), ([], "agent-0: flash I/O")):
            with subprocess.Popen(
                [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as watching:
                assert watching.stdout is not None
                seen = 0
                for line in watching.stdout:
                    seen += line.startswith(last)
                    if seen == 2:
                        break
                code, _, said = interrupt(watching)
            assert (code, said) == (130, "")
        assert interrupt(process)[0] == 0


def _address(line: str) -> str:
    found = re.search(r'"(unix://[^"]+)"', line)
    assert found is not None
    return found[1]


def test_direct_reads_are_for_the_only_tenant(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, "--direct-reads", "acme") as (process, line):
        with ostraca.connect(_address(line), tenant="acme") as client:
            client.volume("v", LAYOUT, block_bytes=4096, create=True)
            assert client.status().overrides.settings == {"direct_reads_tenant": "acme"}
        with (
            ostraca.connect(_address(line), tenant="other") as client,
            pytest.raises(ostraca.RefusedError, match="start `ostraca up` without --direct-reads"),
        ):
            client.volume("v", LAYOUT, block_bytes=4096, create=True)
        interrupt(process)
    code, said = refused(tmp_path, *SMALL, "--direct-reads", "other")
    assert (code, "has volume v of tenant acme: start without --direct-reads" in said) == (1, True)
    new = tmp_path / "new"
    code, said = refused(new, *SMALL, "--direct-reads", "Acme!")
    assert (code, "is not a usable name" in said, new.exists()) == (2, True, False)


def test_a_rating_gives_the_drives_a_write_budget(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL, "--set", "owner.endurance.rated_dwpd=0.5") as (process, line):
        address = re.findall(r'"(unix://[^"]+)"', line)[0]
        with ostraca.connect(address) as client:
            budgets = [shard.budget_bytes_per_day for shard in client.status().shards]
        assert budgets == [96 * MIB] * 2
        assert interrupt(process)[0] == 0


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
    argv = ["up", "--dir", str(tmp_path / "new"), "--print-settings", "--dram", "512MiB", "--agents", "2"]
    assert main([*argv, "--set", "owner.hold_s=20"]) == 0
    shown = capsys.readouterr().out
    assert "# From --set; the default is 30.0.\nhold_s = 20.0\n" in shown
    assert '# From --dram; the default is "512MiB".\ncache_bytes = "256MiB"\n' in shown
    assert not (tmp_path / "new").exists()
    (tmp_path / "shown.toml").write_text(shown)
    assert main([*argv[:-4], "--agents", "2", "--settings", str(tmp_path / "shown.toml")]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if " = " in line] == [
        line for line in shown.splitlines() if " = " in line
    ]


def test_wrong_settings_are_bad_usage_and_all_are_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ostraca_cli", "up", "--dir", str(tmp_path / "new")]
    command += ["--set", "owner.hold=1", "--set", "events_max=some"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ostraca: 2 settings problems:",
        "  --set owner.hold=1: there is no setting owner.hold; the nearest is owner.hold_s",
        "  --set: events_max: the value 'some' is invalid: write a whole number of 0 or more",
    ]
    assert not (tmp_path / "new").exists()


def test_a_token_that_is_replaced_lets_in_at_once_and_the_old_one_no_more(tmp_path: Path) -> None:
    options = ("--listen", "tcp://127.0.0.1:0", "--set", "secrets_check_s=0.05")
    with up(tmp_path, *SMALL, *options) as (process, line):
        address = re.findall(r'"(tcp://[^"]+)"', line)[0]
        file, old, new = tmp_path / "worker.token", (tmp_path / "worker.token").read_text().strip(), "n" * 32
        settings = ostraca.ClientSettings(transports=("inline",))
        with ostraca.connect(address, credentials=old, settings=settings):
            (tmp_path / "next").write_text(new)
            (tmp_path / "next").rename(file)
            assert process.stderr is not None
            assert any("credentials revoked" in words for words in process.stderr), "who was in is put out"
            assert any("Reloaded" in words for words in process.stderr)
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
            assert "STOPPING=1\nSTATUS=writing staged blocks to flash" in iter(
                lambda: manager.recv(4096).decode(), ""
            )


def test_a_drive_that_can_not_be_used_is_told_while_the_other_is_served_until_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, disk = tmp_path / "f", tmp_path / "disk"
    options = (*SMALL, "--agents", "2", "--set", "reopen_backoff_s=0.1", "--set", "turn_s=0.1")
    hashes = [secrets.token_bytes(32) for _ in range(64)]
    stored = np.random.default_rng(7).integers(0, 256, (64, 4096), np.uint8)
    with up(directory, *options) as (process, line):
        with ostraca.connect(re.findall(r'"(unix://[^"]+)"', line)[0]) as client:
            volume = client.volume("v", LAYOUT, block_bytes=4096, create=True)
            chain = volume.chain(hashes, is_chained=False)
            put = volume.put(chain, source=stored, deadline_s=10, ack=ostraca.Ack.COMMITTED)
            assert put.states == (ostraca.PutState.COMMITTED,) * 64
        interrupt(process)
    drive = directory / "enclosure-0" / "drive-0.img"
    disk.mkdir()
    drive.rename(disk / "drive.img")
    drive.symlink_to(disk / "drive.img")
    disk.rename(tmp_path / "unmounted")
    disk.mkdir()
    shutil.copy(directory / "enclosure-0" / "drive-1.img", disk / "drive.img")
    other = (disk / "drive.img").read_bytes()
    with up(directory, *options) as (process, line):
        assert "2 drives (1 unusable)" in line
        assert main(["status", "--dir", str(directory)]) == 0
        assert f"another drive than enclosure-0/drive-0 is at {drive}" in capsys.readouterr().out
        with ostraca.connect(re.findall(r'"(unix://[^"]+)"', line)[0]) as client:
            volume, got = client.volume("v", LAYOUT, block_bytes=4096), np.zeros_like(stored)
            chain = volume.chain(hashes, is_chained=False)
            found = volume.get(chain, into=got, deadline_s=10)
            assert 0 < found.hits < 64
            assert (disk / "drive.img").read_bytes() == other, "nothing is written to another drive"
            disk.rename(tmp_path / "other")
            (tmp_path / "unmounted").rename(disk)
            while found.hits < 64:  # the test's time limit ends it
                found = volume.get(chain, into=got, deadline_s=10)
            assert np.array_equal(got, stored)
            (disk / "drive.img").unlink()
            assert process.stderr is not None
            assert any("was deleted at" in words for words in process.stderr)
            while not any("was deleted at" in each.why for each in client.status().drives):
                pass  # the other agent has said it first
        interrupt(process)
    with up(directory, *options) as (process, line):
        assert "2 drives (1 unusable)" in line
        assert main(["status", "--dir", str(directory)]) == 0
        assert f"{drive} is a link to {disk / 'drive.img'}, where nothing is" in capsys.readouterr().out
        assert not (disk / "drive.img").exists(), "nothing is made in its place"
        interrupt(process)


def test_a_fabric_of_which_no_drive_can_be_used_does_not_start_and_says_why(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        interrupt(process)
    for number in range(2):
        (tmp_path / "enclosure-0" / f"drive-{number}.img").unlink()
    code, said = refused(tmp_path, *SMALL)
    assert code == 1
    assert "none of 2 drives can be used" in said
    assert said.count(".img is missing: put the drive back") == 2


def test_a_first_start_that_was_interrupted_goes_on_making_drives(tmp_path: Path) -> None:
    with up(tmp_path, *SMALL) as (process, _):
        interrupt(process)
    record, drive = tmp_path / "fabric.json", tmp_path / "enclosure-0" / "drive-1.img"
    drive.unlink()
    record.write_text(record.read_text().replace('"is_making_drives": false', '"is_making_drives": true'))
    with up(tmp_path, *SMALL) as (process, line):
        assert "2 drives, " in line
        assert drive.is_file()
        interrupt(process)
    assert '"is_making_drives": false' in record.read_text()


def test_in_a_small_cgroup_sizes_that_nobody_asked_for_are_lowered_and_others_refused(tmp_path: Path) -> None:
    with memory_cgroup(500 * MIB) as (by, limit):
        options = ("--capacity", "384MiB", "--transport", "inline")
        with up(tmp_path, *options, by=by) as (process, line):
            with ostraca.connect(re.findall(r'"(unix://[^"]+)"', line)[0]) as client:
                volume = client.volume("kv", LAYOUT, block_bytes=MIB, create=True)
                memory = np.zeros((64, MIB), np.uint8)
                for _ in range(6):  # more than the memory for blocks, so that all of it is used
                    chain = volume.chain([secrets.token_bytes(32) for _ in memory])
                    put = volume.put(chain, source=memory, deadline_s=20, ack=ostraca.Ack.COMMITTED)
                    assert put.accepted == len(memory)
            code, _, said = interrupt(process)
            assert code == 0
            assert "(500.0 MiB) leaves" in said
            assert str(limit) in said
        command = [*by, sys.executable, "-m", "ostraca_cli", "up", "--dir", str(tmp_path), "--dram", "512MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "an agent wants 704.0 MiB of memory" in done.stderr
        assert f"{limit} is 500.0 MiB. Raise that limit, or lower memory.cache_bytes" in done.stderr


def test_too_few_descriptors_are_refused_with_both_numbers(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    command = [sys.executable, "-m", "ostraca_cli", "up", "--dir", str(tmp_path / "new"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, preexec_fn=few)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "needs at least 52 file descriptors, and the limit is 24: raise ulimit -n" in done.stderr
    assert not (tmp_path / "new").exists()
