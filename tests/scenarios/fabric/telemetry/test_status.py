"""What a whole fabric says of itself, at its agents and on a terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.cli.commands.test_status_view import shown
from tests.support.fabric.fabric_host import MIB, FabricThread, drive_files

from ostraca_cli.commands.agent_query import FabricStatus
from ostraca_cli.testing import small_plan

if TYPE_CHECKING:
    from pathlib import Path


def test_a_drive_that_was_cut_short_is_named_with_both_sizes_and_its_shard_is_nobodys(tmp_path: Path) -> None:
    plan = small_plan(tmp_path / "fabric")
    with FabricThread(plan):
        pass
    os.truncate(drive_files(plan)[0], 100 * MIB)
    with FabricThread(plan) as host:
        (agent,) = host.status()
    (drive,) = agent.unserved.drives
    assert drive.drive == "enclosure-0/drive-0"
    assert "has 100 MiB, and 257 MiB are recorded" in drive.why
    (shard,) = agent.unserved.shards
    assert (shard.shard, shard.why) == ("enclosure-0/drive-0/0", drive.why)
    conditions = {each.name: each for each in agent.conditions}
    assert drive.why in conditions["drives_good"].sentence
    assert not conditions["drives_good"].is_true
    assert conditions["ready"].is_true, "the others are served"
    assert [each.shard for each in agent.shards] == ["enclosure-0/drive-1/0"]
    text = " ".join(shown(FabricStatus((agent,), ())).split())
    assert "none – – – –" in text
    assert drive.why[:60] in text
