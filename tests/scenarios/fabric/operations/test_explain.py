"""`ostraca explain`, from a worker's question to what two agents know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.support.fabric.fabric_host import MIB, SMALL, FabricThread, content, empty, hashes, volume_of

import ostraca
from ostraca import Ack, PutState
from ostraca_cli.program import main
from ostraca_cli.testing import small_plan
from ostraca_fabric.telemetry.explain import BlockExplanation, verdict

BLOCKS = 6


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    plan = replace(small_plan(tmp_path / "fabric"), agents=2, drives=4, capacity_bytes=4 * 65 * MIB)
    with FabricThread(plan) as started:
        yield started


@pytest.fixture
def clients(host: FabricThread) -> Iterator[list[ostraca.Client]]:
    """One client of each agent."""
    with (
        ostraca.connect(host.addresses[0], settings=SMALL) as first,
        ostraca.connect(host.addresses[1], settings=SMALL) as second,
    ):
        yield [first, second]


def test_every_agent_tells_what_the_owner_knows_and_what_happened_at_both(
    clients: list[ostraca.Client],
) -> None:
    writer, reader = map(volume_of, clients)
    for seed in range(4):  # chains of both owners
        chain = writer.chain(hashes(BLOCKS, seed))
        stored = writer.put(chain, source=content(BLOCKS, seed), deadline_s=10, ack=Ack.COMMITTED)
        assert stored.states == (PutState.COMMITTED,) * BLOCKS, stored
        reader.get(chain, into=empty(BLOCKS), deadline_s=10)
        one = chain[3:4]
        told = [volume.explain(one) for volume in (writer, reader)]
        assert [each.agent for each in told] == ["agent-0", "agent-1"]
        assert len({(each.shard, each.owner) for each in told}) == 1
        (owner,) = {each.owner for each in told}
        for each in told:
            assert each.owner_view is not None
            assert (each.owner_view.agent, each.owner_view.is_listed) == (owner, True)
            assert [event.age_s for event in each.events] == sorted(
                (event.age_s for event in each.events), reverse=True
            )
            seen = {(event.agent, event.kind) for event in each.events}
            assert {(owner, "RESERVED"), (owner, "COMMITTED")} <= seen
            if "agent-0" in (each.agent, owner):
                assert ("agent-0", "PUT") in seen
            if "agent-1" in (each.agent, owner):
                assert ("agent-1", "GOT") in seen
        labels = {event.label.partition("/")[0] for each in told for event in each.events}
        assert labels == {client.worker for client in clients}


def test_another_tenants_block_is_explained_as_one_that_nobody_put(host: FabricThread) -> None:
    with host.connect(tenant="red") as red, host.connect(tenant="blue") as blue:
        chain = volume_of(red).chain(hashes(1))
        volume_of(red).put(chain, source=content(1), deadline_s=10, ack=Ack.COMMITTED)
        unknown = volume_of(blue).explain(volume_of(blue).chain(hashes(1, seed=9)))
        theirs = volume_of(blue).explain(chain)
        for each in (unknown, theirs):
            assert (each.is_cached, each.events) == (False, ())
            assert each.owner_view is not None
            assert (each.owner_view.is_listed, each.owner_view.is_being_written) == (False, False)
            assert "no put is known" in verdict(each)


def test_a_volume_of_another_tenant_does_not_exist(
    host: FabricThread, capsys: pytest.CaptureFixture[str]
) -> None:
    with host.connect(tenant="red") as red:
        volume_of(red, "secret")
    for volume in ("secret", "nobody-made-this"):
        assert (
            main(["explain", "ab" * 32, "--volume", volume, "--tenant", "blue", "--agent", host.addresses[0]])
            == 1
        )
        assert f"there is no volume '{volume}' of tenant 'blue'" in capsys.readouterr().err


def test_one_block_is_explained_at_a_time(clients: list[ostraca.Client]) -> None:
    volume = volume_of(clients[0])
    with pytest.raises(ostraca.UsageError, match="2 blocks to explain"):
        volume.explain(volume.chain(hashes(2)))


def test_the_command_tells_people_the_story_of_a_block_of_a_chain(
    host: FabricThread, clients: list[ostraca.Client], capsys: pytest.CaptureFixture[str]
) -> None:
    volume = volume_of(clients[0])
    chain = hashes(BLOCKS)
    volume.put(volume.chain(chain), source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
    arguments = [chain[3].hex(), "--volume", "v", "--root", chain[0].hex(), "--agent", host.addresses[1]]
    assert main(["explain", *arguments]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("It can be got now, from flash: shard enclosure-0/")
    assert any(line.startswith("index") and f"{256 << 10} bytes at" in line for line in shown)
    (line,) = [line for line in shown if " committed " in line]
    assert f" {clients[0].worker}/" in line
    assert line.endswith("COMMITTED")
    assert main(["explain", *arguments, "--json"]) == 0
    decoded = msgspec.json.decode(capsys.readouterr().out, type=BlockExplanation)
    assert decoded.owner_view is not None
    assert decoded.owner_view.is_listed
