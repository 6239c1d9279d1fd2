"""The page on three agents: its commands work as they are, but for where they work."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fabric.membership.nodes import Cluster, free_ports, program

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "three-agents.md").read_text()
BLOCKS = re.findall(r"```(console|toml|python)\n(.*?)```", PAGE, re.DOTALL)
CONSOLE = [text for kind, text in BLOCKS if kind == "console"]
WITHIN_S = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        program() is None or not all(map(find_spec, ("grpc", "google"))), reason="no etcd, or no grpc"
    ),
]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def here(etcd: Cluster, tmp_path: Path) -> Callable[[str], str]:
    """Say in place of the page's directory, ports and etcd those of this test."""
    ports = [str(port) for port in free_ports(3)]

    def translated(text: str) -> str:
        text = text.replace("/tmp/pod", str(tmp_path)).replace("127.0.0.1:2379", etcd.endpoints[0])
        for number, port in enumerate(ports):
            text = text.replace(f"127.0.0.1:740{number}", f"127.0.0.1:{port}")
        return text

    return translated


def ran(command: str, folder: Path) -> str:
    words = [sys.executable, *(["-m", "ostraca_cli"] if command.startswith("ostraca ") else [])]
    done = subprocess.run(
        [*words, *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def masked(text: str) -> str:
    """Return text without what differs each time: ids and ports."""
    return re.sub(r"tcp://127.0.0.1:\d+", "tcp://HERE", re.sub(r"\b[0-9a-f]{32}\b", "ID", text))


def started(stack: ExitStack, command: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start an agent that is killed in the end; return it with its ready line."""
    words = [sys.executable, "-m", "ostraca_cli", *shlex.split(command)[1:]]
    log = stack.enter_context((folder / "log").open("a"))
    process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_the_page_from_top_to_bottom(here: Callable[[str], str], tmp_path: Path) -> None:
    assert CONSOLE[0] == "$ etcd --data-dir /tmp/pod/etcd\n"
    create, *agents, status, scripts, again = [here(text) for text in CONSOLE[1:]]
    command, _, printed = create.removeprefix("$ ").partition("\n")
    assert masked(ran(command, tmp_path)) == masked(printed)
    (settings,) = (text for kind, text in BLOCKS if kind == "toml")
    (tmp_path / "agent.toml").write_text(here(settings))
    put, get = (here(text) for kind, text in BLOCKS if kind == "python")
    (tmp_path / "put.py").write_text(put)
    (tmp_path / "get.py").write_text(get)
    with ExitStack() as stack:
        running = []
        for each in agents:
            command, ready = each.removeprefix("$ ").splitlines()
            process, said = started(stack, command, tmp_path)
            running.append(process)
            assert said.partition("  #")[0] == ready.partition("  #")[0], (tmp_path / "log").read_text()
        shown = ran(status.removeprefix("$ ").strip(), tmp_path)
        assert all(f"agent-{number}" in shown for number in range(3))
        assert "does not answer" not in shown
        put_command, put_said, get_command, get_said = scripts.splitlines()
        assert ran(put_command.removeprefix("$ "), tmp_path).strip() == put_said
        assert ran(get_command.removeprefix("$ "), tmp_path).strip() == get_said
        first = json.loads(ran(f"{status.removeprefix('$ ').strip()} --json", tmp_path))["agents"][0]
        assert first["agent"] == "agent-0"
        running[0].kill()
        again_command, again_said = again.splitlines()
        got = ran(again_command.removeprefix("$ "), tmp_path).strip()
        assert (got == again_said) == (not first["shards"]), "blocks of the dead agent's shards are misses"
        assert ran(get_command.removeprefix("$ "), tmp_path).strip() == get_said, "and are cached there"
        for _ in range(WITHIN_S):
            if ran(again_command.removeprefix("$ "), tmp_path).strip() == again_said:
                break
        else:
            raise AssertionError("the others never had all blocks")
        for process in running[1:]:
            process.terminate()
            assert process.wait(WITHIN_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
