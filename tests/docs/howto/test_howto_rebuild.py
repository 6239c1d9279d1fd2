"""The page on rebuilding a fabric: its command, where a record is lost, prints what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.pod.processes import until

import ostraca
from ostraca_cli.tools.bench.fabric import running_fabric

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "rebuild-a-fabric.md").read_text()
COMMANDS = re.findall(r"```console\n\$ ostraca (.*?)\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.slow


def masked(text: str) -> str:
    """Return text without what differs each time: ids."""
    return re.sub(r"\b[0-9a-f]{32}\b", "ID", text)


def test_the_command_of_the_page_prints_what_the_page_says_and_its_last_line_starts_the_fabric(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "fabric"
    shape = ("--capacity", "64MiB", "--drives", "2", "--dram", "0")
    layout = ostraca.Layout(model="my-model@1", dtype="bf16", page_tokens=16)
    with running_fabric(directory, *shape) as fabric, ostraca.connect(fabric.address) as client:
        client.volume("drives", layout, block_bytes=65536, create=True)
        until(
            lambda: [shard.volumes_recorded for shard in client.status().shards] == [1, 1],
            "each drive has recorded the volume",
        )
    (directory / "fabric.json").unlink()
    ((command, printed),) = COMMANDS
    done = subprocess.run(
        [sys.executable, "-m", "ostraca_cli", *command.replace("/tmp/fabric", str(directory)).split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert masked(done.stdout.replace(str(directory), "/tmp/fabric")) == masked(printed)
    started = done.stdout.splitlines()[-1].partition(" ostraca up ")[2].split()
    assert started[:2] == ["--dir", str(directory)]
    with running_fabric(directory, *started[2:]) as fabric, ostraca.connect(fabric.address) as client:
        assert client.volume("drives", layout, block_bytes=65536).name == "drives"
