"""The page on onboarding an enclosure: its commands work as they are, but for where they work."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import pytest
from tests.fabric.membership.nodes import Cluster, free_ports, program

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "enclosures" / "onboard-an-enclosure.md").read_text()
BLOCKS = re.findall(r"```(console|toml)\n(.*?)```", PAGE, re.DOTALL)
WITHIN_S = 90
NEEDED = ("grpc", "google", "fastapi", "uvicorn", "rich")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        program() is None or not all(map(find_spec, NEEDED)), reason="no etcd, or no ostraca[agent,admin]"
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
    ports = free_ports(3)

    def translated(text: str) -> str:
        text = text.replace("/tmp/pod", str(tmp_path)).replace("127.0.0.1:2379", etcd.endpoints[0])
        for known, port in zip((7400, 7401, 7480), ports, strict=True):
            text = text.replace(f"127.0.0.1:{known}", f"127.0.0.1:{port}")
        return text

    return translated


def words(command: str) -> list[str]:
    first, *rest = shlex.split(command)
    return [*([sys.executable, "-m", "ostraca_cli"] if first == "ostraca" else [first]), *rest]


def masked(text: str) -> str:
    """Return text without what differs each time: ids, speeds, and blanks at ends of lines."""
    text = re.sub(r"[0-9a-f]{12}-[0-9a-f]{8}|\b[0-9a-f]{32}\b", "ID", text)
    return re.sub(r" +$", "", re.sub(r"reads \d+ MB/s", "reads N MB/s", text), flags=re.MULTILINE)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, each with what it printed."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def test_the_page_from_top_to_bottom(
    here: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, people = (text for kind, text in BLOCKS if kind == "toml")
    (tmp_path / "agent.toml").write_text(here(settings))
    (tmp_path / "people.toml").write_text(people)
    listen = re.search(r"--listen (127.0.0.1:7480)", PAGE)
    assert listen is not None
    monkeypatch.setenv("OSTRACA_ADMIN_URL", here(f"http://{listen[1]}"))
    shown: dict[str, str] = {}
    running: dict[str, subprocess.Popen[str]] = {}
    with ExitStack() as stack, (tmp_path / "log").open("w") as log:
        for block in (text for kind, text in BLOCKS if kind == "console"):
            for command, printed in commands(block):
                if command.startswith("etcd "):
                    continue
                if command.startswith("export "):
                    monkeypatch.setenv("OSTRACA_ADMIN_TOKEN", command.rpartition("=")[2])
                elif command.startswith("ostraca serve "):
                    daemon = command.split()[2]
                    if daemon in running and "agent" not in command:  # it is started anew
                        running[daemon].send_signal(signal.SIGINT)
                        assert running[daemon].wait(WITHIN_S) == 0
                    running[daemon] = started(stack, words(here(command)), tmp_path, log)
                    ready = first_line(running[daemon])
                    assert ready.startswith("ready: "), (tmp_path / "log").read_text()
                    assert ready == here(printed) or not printed
                else:
                    done = subprocess.run(
                        words(here(command)),
                        cwd=tmp_path,
                        capture_output=True,
                        text=True,
                        check=False,
                        timeout=WITHIN_S,
                    )
                    refused = printed.startswith("ostraca: ")
                    assert done.returncode == (3 if refused else 0), (command, done.stderr)
                    assert "Traceback" not in done.stderr
                    shown[command] = done.stdout
                    if printed:
                        said = done.stderr if refused else done.stdout
                        assert masked(said) == masked(here(printed)), command
        nguids = {*re.findall(r"\b[0-9a-f]{32}\b", shown["ostraca enclosure show shelf-1"])}
        assert len(nguids) == 2
        assert "shelf-1/drive-1/0" in shown["ostraca fabric shards"]
        audit = shown["ostraca audit"]
        assert [line.split()[-2] for line in audit.splitlines()] == [
            *("onboard", "expand", "replace", "drain", "undrain", "retire"),
        ]
    assert "Traceback" not in (tmp_path / "log").read_text()


def started(stack: ExitStack, command: list[str], folder: Path, log: IO[str]) -> subprocess.Popen[str]:
    """Start a daemon that is killed in the end."""
    process = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
    )
    stack.callback(process.kill)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
