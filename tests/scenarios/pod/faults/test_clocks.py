"""Agents whose clocks have nothing to do with each other. Real processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tests.fabric.membership.nodes import Place
from tests.support.pod.processes import Pod, until
from tests.support.pod.work import CHAINS, await_puts, missing, put

pytestmark = pytest.mark.slow

AHEAD_S = 86_400
ELSEWHEN = (
    *("unshare", "--time", "--monotonic", str(AHEAD_S), "--boottime", str(AHEAD_S)),
    *("--fork", "--kill-child"),
)
"""A command is run with monotonic clocks that are a day ahead, as on a host that started a day earlier."""

MORE = range(100, 124)
ALL = (*CHAINS, *MORE)


@pytest.fixture
def elsewhen() -> Place:
    """Return a host with other monotonic clocks."""
    shown = [sys.executable, "-c", "import time; print(time.monotonic())"]
    try:
        done = subprocess.run([*ELSEWHEN, *shown], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no time namespaces: {error}")
    if done.returncode != 0:
        pytest.skip(f"no time namespaces: {done.stderr.strip()}")
    assert float(done.stdout) > time.monotonic() + AHEAD_S / 2, "its clock is another one"
    return Place(before=ELSEWHEN)


def test_agents_whose_clocks_are_a_day_apart_serve_each_other_s_blocks_and_succeed_each_other(
    own: Pod, elsewhen: Place
) -> None:
    own.create()
    here, ahead = own.agent("agent-0"), own.agent("agent-1", place=elsewhen)
    own.start()
    assert set(own.claims().values()) == {"agent-0", "agent-1"}
    with here.connect() as at_here:
        with ahead.connect() as at_ahead:
            assert put(at_here) == list(CHAINS)
            assert put(at_ahead, MORE) == list(MORE)
            assert missing(at_here, ALL) == missing(at_ahead, ALL) == []
        ahead.kill()
        until(lambda: not missing(at_here, ALL, deadline_s=0.5), "every block can be got again")
        await_puts(at_here)
    own.start()
    with ahead.connect() as at_ahead:
        assert missing(at_ahead, ALL) == []
        here.kill()
        until(lambda: not missing(at_ahead, ALL, deadline_s=0.5), "every block can be got again")
        await_puts(at_ahead)
    own.check_logs()
