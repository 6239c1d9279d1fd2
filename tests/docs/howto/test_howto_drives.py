"""The page on looking at a drive: its commands, on a fabric that ran, print what it says."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ostraca
from ostraca_cli.tools.bench.fabric import running_fabric

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "enclosures" / "look-at-a-drive.md").read_text()
COMMANDS = re.findall(r"```console\n\$ ostraca (.*?)\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.slow


def masked(text: str) -> str:
    """Return text without what differs each time: ids."""
    return re.sub(r"\b[0-9a-f]{32}\b", "ID", text)


def test_every_command_of_the_page_prints_what_the_page_says(tmp_path: Path) -> None:
    directory = tmp_path / "fabric"
    with (
        running_fabric(directory, "--capacity", "64MiB", "--drives", "1", "--dram", "0") as fabric,
        ostraca.connect(fabric.address) as client,
    ):
        layout = ostraca.Layout(model="my-model@1", dtype="bf16", page_tokens=16)
        volume = client.volume("drives", layout, block_bytes=65536, create=True)
        chain = volume.chain([hashlib.sha256(b"%d" % number).digest() for number in range(8)])
        volume.put(chain, source=np.ones((8, 65536), np.uint8), deadline_s=5.0, ack=ostraca.Ack.COMMITTED)
    assert len(COMMANDS) == PAGE.count("$ ostraca ") == 2
    for command, printed in COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "ostraca_cli", *command.replace("/tmp/fabric", str(directory)).split()],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert masked(done.stdout.replace(str(directory), "/tmp/fabric")) == masked(printed)
