"""The short form of ``make soak-pod``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.fabric.membership.nodes import skip
from tests.scenarios.soak_pod.__main__ import NOT_HERE

pytestmark = pytest.mark.slow

SHORT = (
    *("--minutes", "0.1", "--round", "6", "--pace", "0.6", "--agents", "3", "--workers", "1"),
    *("--seed", "31", "--no-opening", "--first", "kill_agent,cut_agents,lose_etcd,stop_agent"),
)
"""One round or two; what is drawn depends on how fast this machine is."""

ENDS_WITHIN_S = 100.0


def soaked() -> str:
    """Run it as a program: it takes itself to a network of its own. Skip the test where it can't run."""
    command = [sys.executable, "-m", "tests.scenarios.soak_pod", *SHORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends what it has begun
            said, _ = process.communicate()
    if process.returncode == NOT_HERE:
        skip(said.strip())
    return said


def test_a_pod_that_is_disturbed_in_every_way_serves_no_wrong_byte_and_loses_no_block() -> None:
    said = soaked()
    assert said.endswith("nothing was wrong\n"), said
    faults = said.partition("faults:")[2].partition("blocks of")[0]
    done = set(re.findall(r"^ +[1-9][0-9]* (.+)$", faults, re.MULTILINE))
    assert {"kills an agent", "stops an agent", "lose etcd"} <= done, said
    if (without := re.search(r"^no hosts of their own for agents.*", said, re.MULTILINE)) is not None:
        skip(f"all went well but for what could not be tried: {without.group()}")
    assert "cut agents" in done, said
