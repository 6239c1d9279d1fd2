"""The script that `helm test` runs, as a worker elsewhere with a token."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.helm.rendering import CHART
from tests.support.pod.processes import Pod
from tests.support.pod.secured import secret

pytestmark = pytest.mark.slow

SCRIPT = CHART / "files" / "send_block.py"


def _run(pod: Pod, token: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OSTRACA_AGENT": pod.agents[0].reached_at,
        "OSTRACA_TOKEN_FILE": str(token),
        "OSTRACA_TENANT": "default",
    }
    return subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=False, timeout=180, env=environment
    )


def test_a_block_goes_to_flash_and_comes_back(pod: Pod, tmp_path: Path) -> None:
    tokens = tomllib.loads((pod.files / "tokens.toml").read_text())
    done = _run(pod, secret(tmp_path / "token", tokens["tokens"]["default"][0]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "a block of 65536 bytes was stored on flash, and came back unchanged\n"


def test_a_worker_with_a_wrong_token_fails_at_once(pod: Pod, tmp_path: Path) -> None:
    done = _run(pod, secret(tmp_path / "token", "not-a-token-of-this-fabric"))
    assert done.returncode == 1
    assert "OSTRACA" not in done.stdout
    assert "token" in done.stdout
