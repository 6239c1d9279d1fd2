"""What agents and clients count is what happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fabric.fabric_host import BLOCK_BYTES, FabricThread, content, empty, hashes, volume_of

from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.program import main
from ostraca_cli.testing import small_plan

BLOCKS = 6


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def test_both_ends_count_blocks_by_state_and_reason_and_their_bytes(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS + 2))
        volume.put(chain[:BLOCKS], source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        volume.get(chain, into=empty(BLOCKS + 2), deadline_s=10)
        volume.lookup(chain, deadline_s=10)
        (agent,) = host.status()
        for operations in (client.metrics().operations, agent.operations):
            found = {tally.operation: tally for tally in operations}
            assert found["put"].of(PutState.COMMITTED) == BLOCKS
            for operation in ("get", "lookup"):
                assert found[operation].of(BlockState.HIT) == BLOCKS
                assert found[operation].of(BlockState.MISS, Reason.NOT_FOUND) == 2
            assert found["get"].bytes == found["put"].bytes == BLOCKS * BLOCK_BYTES
            assert found["get"].requests == 1
            assert 0 < found["get"].seconds < 10
            assert found["prefetch"].requests == 0


def test_tokens_and_declared_seconds_are_of_the_part_that_hit(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS * 2))
        volume.put(chain[:BLOCKS], source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        volume.get(chain, into=empty(BLOCKS * 2), deadline_s=10, recompute_s=1000.0)
        volume.get(chain, into=empty(BLOCKS * 2), deadline_s=10)
        metrics = client.metrics()
        assert metrics.hit_tokens == 2 * BLOCKS * volume.layout.page_tokens
        assert 490 < metrics.declared_saved_s < 500, "half of what was declared, less what the get took"


def test_what_ends_without_an_agent_is_counted_too(host: FabricThread) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        host.stop()
        told = volume.get(volume.chain(hashes(3)), into=empty(3), deadline_s=5)
        assert set(told.reasons) == {Reason.DISCONNECTED}
        assert client.metrics().operation("get").of(told.states[0], Reason.DISCONNECTED) == 3


def test_the_command_prints_an_agents_metrics(host: FabricThread, capsys: pytest.CaptureFixture[str]) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        volume.get(volume.chain(hashes(3)), into=empty(3), deadline_s=10)
    assert main(["metrics", host.addresses[0]]) == 0
    shown = capsys.readouterr().out
    assert 'ostraca_agent_blocks_total{operation="get",state="MISS",reason="NOT_FOUND"} 3\n' in shown
    assert shown.endswith("# EOF\n")
