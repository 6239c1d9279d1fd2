"""The page on serving an enclosure: what it shows is what is said, and its enclosure on files works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.enclosure.adapters.machine import Machine
from tests.fabric.membership.nodes import Cluster, program

from ostraca_cli.tools.doctor.fitness import find_drives, fitness_lines

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "enclosures" / "serve-an-enclosure.md").read_text()
CONSOLE = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


def shown(command: str) -> tuple[str, str]:
    """Return a command of the page and what it prints."""
    (found,) = (text for text in CONSOLE if text.startswith(f"$ {command}"))
    line, _, printed = found.removeprefix("$ ").partition("\n")
    return line, printed


def test_a_drive_is_explained_as_the_page_shows(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.drive()
    _, printed = shown("ostraca doctor drive")
    (drive,) = find_drives(["nvme0n1"], machine.drives)
    said = "\n".join(fitness_lines(drive)).replace(str(machine.roots.dev), "/dev")
    assert f"{said}\n" == printed


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.skipif(
    program() is None or not all(map(find_spec, ("grpc", "google"))), reason="no etcd, or no grpc"
)
def test_the_enclosure_on_files_works_as_it_is(etcd: Cluster, tmp_path: Path) -> None:
    def here(text: str) -> str:
        text = text.replace("/tmp/shelf", str(tmp_path / "shelf")).replace("1GiB", "3MiB")
        return text.replace("127.0.0.1:2379", etcd.endpoints[0])

    ostraca = [sys.executable, "-m", "ostraca_cli"]
    begin = ["fabric", "create", "--etcd", etcd.endpoints[0], "--files", str(tmp_path / "files")]
    subprocess.run([*ostraca, *begin, "--capacity", "256MiB"], check=True, capture_output=True, timeout=60)
    command, ready = map(here, shown("ostraca serve enclosure --id shelf-1 --files /tmp/shelf"))
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(
            [*ostraca, *shlex.split(command)[1:]], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == ready, (tmp_path / "log").read_text()
            daemon.terminate()
            assert daemon.wait(60) == 0
            daemon.stdout.close()
        finally:
            daemon.kill()
