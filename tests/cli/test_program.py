"""The command line without any fabric: what it takes, what it refuses, and what it says."""

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ostraca_cli.command import seconds_argument
from ostraca_cli.commands.admin.audit import COMMAND as AUDIT
from ostraca_cli.commands.admin.enclosure import COMMAND as ENCLOSURE
from ostraca_cli.commands.admin.events import COMMAND as EVENTS
from ostraca_cli.commands.admin.operation import COMMAND as OPERATION
from ostraca_cli.commands.admin.settings import COMMAND as SETTINGS
from ostraca_cli.commands.admin.tenant import COMMAND as TENANT
from ostraca_cli.commands.admin.volume import COMMAND as VOLUME
from ostraca_cli.commands.explain import COMMAND as EXPLAIN
from ostraca_cli.commands.fabric import COMMAND as FABRIC
from ostraca_cli.commands.metrics import COMMAND as METRICS
from ostraca_cli.commands.serve.command import COMMAND as SERVE
from ostraca_cli.commands.status import COMMAND as STATUS
from ostraca_cli.commands.status import chosen_address
from ostraca_cli.commands.up import COMMAND as UP
from ostraca_cli.program import main
from ostraca_cli.tools.bench import COMMAND as BENCH
from ostraca_cli.tools.doctor import COMMAND as DOCTOR
from ostraca_cli.tools.replay import COMMAND as REPLAY
from ostraca_fabric.errors import ConnectError

COMMANDS = (
    *(UP, SERVE, STATUS, METRICS, EXPLAIN, DOCTOR, FABRIC, ENCLOSURE, TENANT, VOLUME, SETTINGS, OPERATION),
    *(AUDIT, EVENTS, BENCH, REPLAY),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_each_command_explains_itself_with_an_example(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(command, type(UP))
    assert main([command.name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"$ ostraca {command.name}" in shown
    assert shown.startswith(f"usage: ostraca {command.name}")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command.summary in shown for command in COMMANDS)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.5", 0.5), ("200ms", 0.2), ("7s", 7.0), ("5 min", 300.0), ("6h", 21600.0), ("2d", 172800.0)],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert seconds_argument(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["up", "--capacity", "lots"], "--capacity: 'lots' is no size"),
        (["up", "--agents", "0"], "--agents: '0' is no count"),
        (["up", "--transport", "carrier-pigeon"], "carrier-pigeon"),
        (["up", "--cap", "4GiB"], "unrecognized arguments: --cap 4GiB"),
        (["--cap", "up"], "usage: ostraca "),
        (["metrics", "--cap"], "usage: ostraca metrics "),
        (["serve", "agent", "--cap", "1"], "usage: ostraca serve agent "),
        (["status", "unix:///a.sock", "--dir", "/tmp"], "not allowed with"),
        (["status", "over there"], "is not an address"),
        (["explain", "no-hex", "--volume", "v"], "'no-hex' is no hash"),
        (["explain", "00", "--volume", "v", "--agent", "unix:///a.sock"], "hashes of 1 bytes: 8 to 64"),
        (["up", "--set", "owner.blocks_per_shard_max=1000"], "set it to 1024 to"),
        (["up", "--direct-reads", "Acme!"], "tenant 'Acme!' is not a usable name"),
        (["up", "--http", "9464"], "--http: '9464' is no address for HTTP: write host:port"),
        (["fabric"], "ACTION"),
        (["fabric", "create"], "--files"),
        (
            ["fabric", "create", "--files", "/nowhere"],
            "the address of etcd is missing: give --etcd HOST:PORT",
        ),
        (["fabric", "rebuild", "--etcd", "e:1"], "the directory of the drives is missing: give --files DIR"),
        (["serve"], "DAEMON"),
        (["serve", "agent"], "the address of etcd is missing: give --etcd HOST:PORT"),
        (["serve", "agent", "--etcd", "http://e:2379"], "give host:port, without http://"),
        (["serve", "agent", "--etcd", "e:1,f"], "'f' is not an endpoint of etcd: give host:port"),
        (["serve", "agent", "--etcd", ","], "'' is not an endpoint of etcd: give each member"),
        (
            ["serve", "agent", "--etcd", "e:99999"],
            "'e:99999' is not an endpoint of etcd: ports are 1 to 65535",
        ),
        (["serve", "agent", "--etcd", "::1:2379"], "put an IPv6 address in brackets"),
        (["serve", "agent", "--etcd", "e:1", "--prefix", "Pod"], "is not a usable prefix"),
        (["serve", "agent", "--id", "Host 7"], "is not a usable name"),
        (["serve", "agent", "--fabric", "12"], "fabric is '12': give 32 hex digits"),
        (["serve", "agent", "--set", "tls.cert=c"], "tls.cert, tls.key and tls.ca go together"),
        (["serve", "agent", "--etcd-user", "u"], "etcd.user and etcd.password_file go together"),
        (["fabric", "rebuild", "--fabric", "12"], "'12' is no fabric id"),
        (["fabric", "rebuild", "--key", "k", "--new-key"], "not allowed with"),
        (["enclosure"], "ACTION"),
        (["enclosure", "add", "shelf-1"], "--controller"),
        (["enclosure", "add", "s", "--controller", "c", "--segment", "x"], "--segment: 'x' is no size"),
        (["enclosure", "list", "--timeout", "0"], "--timeout: '0' is no time"),
        (["enclosure", "list", "--admin", "10.0.0.7:7480"], "is no URL of an admin service"),
        (["enclosure", "list", "--admin", "http://[::1"], "is no URL"),
        (
            ["enclosure", "list", "--admin", "http://10.0.0.7"],
            "would send the token in the clear: use https://",
        ),
        (["enclosure", "list", "--admin", "https://10.0.0.7", "--tls-ca", "/no"], "has no CA certificate"),
        (["operation", "show"], "ID"),
        (["audit", "--last", "0"], "--last: '0' is no count"),
        (["bench", "--seconds", "-1"], "--seconds: '-1' is no time"),
        (["bench", "--seconds", "5m"], "--seconds: '5m' is no time: write seconds, or a number with"),
        (["bench", "--block-bytes", "1GiB"], "--block-bytes is 1073741824"),
        (["bench", "unix:///a.sock", "--dir", "/tmp"], "exclude each other"),
    ],
)
def test_bad_usage_is_code_2_and_says_what_is_wrong(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_status_says_how_to_start_a_fabric_where_none_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"ostraca: no fabric runs in {tmp_path}: start one with `ostraca up --dir {tmp_path}`, "
        "or pass the address of an agent\n"
    )


def test_the_daemon_of_the_host_is_asked_where_no_address_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca_cli.commands.status.DAEMON_SOCKET", tmp_path / "agent.sock")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = tmp_path / "state" / "ostraca" / "agent-0.sock"
    own.parent.mkdir(parents=True)
    options = argparse.Namespace(address=None, dir=None)
    with pytest.raises(ConnectError, match="no fabric runs in"):
        chosen_address(options)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "agent.sock"))
        daemon.listen()
        assert chosen_address(options) == f"unix://{tmp_path}/agent.sock"
        with socket.socket(socket.AF_UNIX) as fabric:
            fabric.bind(str(own))
            fabric.listen()
            assert chosen_address(options) == f"unix://{own}", "one's own fabric comes first"
        with pytest.raises(ConnectError, match="no fabric runs in"):
            chosen_address(argparse.Namespace(address=None, dir=tmp_path))


def test_status_of_an_address_where_nobody_listens_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"unix://{tmp_path}/agent.sock"
    assert main(["status", address]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"ostraca: can't reach an agent at {address}")
    assert said.count("\n") == 1


def test_a_missing_extra_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'rich.table'", name="rich.table")

    monkeypatch.setattr("ostraca_cli.program._COMMANDS", (type(UP)("up", "", "", "", (), run),))
    assert main(["up"]) == 1
    assert capsys.readouterr().err == ("ostraca: this command needs rich: pip install 'ostraca[agent]'\n")


def test_a_missing_extra_of_the_admin_service_is_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    command = dataclasses.replace(ENCLOSURE, options=(), run=run)
    monkeypatch.setattr("ostraca_cli.program._COMMANDS", (command,))
    assert main(["enclosure"]) == 1
    assert "pip install 'ostraca[admin]'" in capsys.readouterr().err


def test_ctrl_c_is_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ostraca_cli.program._COMMANDS", (type(UP)("up", "", "", "", (), run),))
    assert main(["up"]) == 130
    assert capsys.readouterr().err == ""


def test_help_loads_nothing_that_an_sdk_only_install_lacks() -> None:
    program = (
        "import sys; from ostraca_cli import main; code = main(['--help'])\n"
        "heavy = {'rich', 'uvloop', 'nixl_cu12', 'numpy', 'ostraca_dpu_agent', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core, one thread, whoever asks for more")
def test_a_command_has_no_threads_for_matrices() -> None:
    program = (
        "import os, sys; from ostraca_cli import main; main(['--version'])\n"
        "import numpy\n"
        "sys.exit(len(os.listdir('/proc/self/task')) - 1)"
    )
    others = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    assert subprocess.run([sys.executable, "-c", program], check=False, env=others).returncode == 0


def test_python_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ostraca_cli", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("ostraca ")


def test_output_that_nobody_reads_to_its_end_is_no_traceback() -> None:
    program = "import sys; from ostraca_cli import main; sys.exit(main(['status', '--help']))"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    said = child.stderr.read()
    child.stderr.close()
    child.wait()
    assert b"Traceback" not in said
