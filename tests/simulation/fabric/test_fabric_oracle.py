"""The fabric's oracle: tenants and volumes that share engine hashes, and claims of owners."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.simulation.fabric.history.history import History
from tests.simulation.fabric.history.story import Story
from tests.simulation.fabric.oracle.operations import Seen
from tests.simulation.fabric.oracle.oracle import Oracle
from tests.simulation.fabric.oracle.resting import everything_is_found, excuse, rest, restlessness
from tests.simulation.fabric.world.blocks import VOLUMES, Blocks, Version
from tests.simulation.fabric.world.watched import Watched
from tests.simulation.fabric.world.worker import Ended
from tests.simulation.fabric.world.world import Setup, World
from tests.simulation.shard.model import ViolationError
from tests.support.simulated.virtual_hosts import HostsLoop

from ostraca_dpu_agent.controller.plan import REJOIN_WITHIN_S
from ostraca_dpu_agent.controller.served_shards import ServedShards
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_fabric.model.chain import DEPTH_UNKNOWN
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason

if TYPE_CHECKING:
    from ostraca_dpu_agent.controller.served_shard import ServedShard
    from ostraca_dpu_agent.shards.shard import OwnedShard

OTHER_VOLUME, OTHER_TENANT = 1, 2
"""Twins of block 0."""


def rows(values: Iterable[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)


def listed(oracle: Oracle, number: int, under: int | None = None) -> Version:
    """Have a put of a block listed, under another block's key if so asked."""
    made = oracle.new_version(number)
    keys = rows([oracle.key_of(number if under is None else under)])
    oracle.offered(keys, rows([made.tag]))
    oracle.answered(keys, rows([made.tag]))
    return made


def ended(state: int, reason: Reason = Reason.NONE, handed: dict[int, bytes] | None = None) -> Ended:
    return Ended([state], [reason], handed or {}, "h0")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(Blocks(6, VOLUMES), is_lied_to=False)


def test_blocks_of_one_hash_are_in_all_volumes() -> None:
    blocks = Blocks(6, VOLUMES)
    assert blocks.twins(0) == [OTHER_VOLUME, OTHER_TENANT]
    assert [str(blocks.volume_of(number)) for number in range(3)] == [
        "tenant/volume",
        "tenant/ntvolume",
        "tena/ntvolume",
    ]
    assert len({blocks.spans([number])[0].hashes for number in range(3)}) == 1
    assert len({blocks.length(number) for number in range(3)}) == 1


def test_a_volume_has_a_chain_for_each_rank_on_both_sides_of_a_stripe_units_end() -> None:
    blocks = Blocks(48, VOLUMES, chained=0.5)
    one, other = blocks.chains(VOLUMES[0])
    assert (one, other) == (range(0, 24, 6), range(3, 24, 6))
    (span,) = blocks.spans(one)
    assert (span.rank, span.depth, span.unit_blocks, span.chain_blocks) == (0, 30, (2, 2), 34)
    assert [(each.rank, each.depth, len(each)) for each in blocks.spans([6, 9, 15, 24, 27])] == [
        (0, 31, 1),
        (1, 31, 2),
        (0, DEPTH_UNKNOWN, 2),
    ]
    assert blocks.twins(6) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(("states", "prefix"), [([1, 1, 1, 0], 1), ([0, 1, 1, 1], 0), ([1, 1, 1, 1], 2)])
def test_a_prefix_is_what_the_chains_of_all_ranks_have(states: list[int], prefix: int) -> None:
    oracle = Oracle(Blocks(48, VOLUMES, chained=0.5), is_lied_to=False)
    assert oracle.found_prefix([6, 12, 9, 15], Ended(states, [0] * 4, {}, "h0")) == prefix


@pytest.mark.parametrize("other", [OTHER_VOLUME, OTHER_TENANT])
def test_a_get_hands_over_the_bytes_of_its_own_volume_only(oracle: Oracle, other: int) -> None:
    own, theirs = listed(oracle, 0), listed(oracle, other)
    oracle.got([0], ended(BlockState.HIT, handed={0: own.data.tobytes()}))
    with pytest.raises(ViolationError, match=r"WRONG BYTES of block 0 .* those of block"):
        oracle.got([0], ended(BlockState.HIT, handed={0: theirs.data.tobytes()}))


@pytest.mark.parametrize("other", [OTHER_VOLUME, OTHER_TENANT])
def test_no_answer_tells_of_what_only_another_volume_has(oracle: Oracle, other: int) -> None:
    listed(oracle, other)
    mine = oracle.new_version(0)
    known = {0, other}
    with pytest.raises(ViolationError, match=rf"is found, .* block {other} of .* were"):
        oracle.looked_up([0], ended(BlockState.HIT), known)
    with pytest.raises(ViolationError, match="is EXISTS"):
        oracle.put([mine], ended(PutState.EXISTS), Ack.COMMITTED, known)
    with pytest.raises(ViolationError, match="is DAMAGED"):
        oracle.got([0], ended(BlockState.MISS, Reason.DAMAGED))
    with pytest.raises(ViolationError, match="is IN_FLIGHT"):
        oracle.put([mine], ended(PutState.DECLINED, Reason.IN_FLIGHT), Ack.COMMITTED, known)
    oracle.looked_up([0], ended(BlockState.MISS, Reason.NOT_FOUND), known)


def test_what_has_been_put_here_may_be_told(oracle: Oracle) -> None:
    listed(oracle, 0)
    mine = oracle.new_version(0)
    oracle.looked_up([0], ended(BlockState.HIT), {0})
    oracle.put([mine], ended(PutState.EXISTS), Ack.COMMITTED, {0})
    oracle.put([mine], ended(PutState.DECLINED, Reason.IN_FLIGHT), Ack.COMMITTED, {0})


def test_no_owner_lists_a_block_under_another_ones_key(oracle: Oracle) -> None:
    with pytest.raises(ViolationError, match="a tag that no worker has made"):
        listed(oracle, 0, under=OTHER_TENANT)
    with pytest.raises(ViolationError, match="the key of no block"):
        oracle.offered(rows([b"k" * 16]), rows([oracle.new_version(0).tag]))


# -------------------------------------------------------------------------------------- what owners have said


def owned_shard(world: World) -> OwnedShard:
    (owned,) = (owned for process in world.agents.values() for owned in process.shards.values())
    return owned


def lose(world: World, number: int) -> None:
    """Take a block out of its owner's index, and tell nobody."""
    index = owned_shard(world).core.index
    index.remove(index.find(rows([world.oracle.key_of(number)])))


def drop(world: World, number: int) -> None:
    """Let its owner take a block for damaged."""
    core, key = owned_shard(world).core, world.oracle.key_of(number)
    row = core.index.find(rows([key]))
    offsets = core.index.offsets(row)
    (generation,) = core.ring.generations[core.geometry.segment_of(offsets)].tolist()
    assert core.drop(key, offset=int(offsets[0]), generation=generation, tag=core.index.tags(row).tobytes())


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("leave", [lose, drop])
def test_what_an_owner_has_found_and_said_it_has_until_it_lets_it_go(
    leave: Any, *, is_told: bool, is_asked: bool
) -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1, drives=1, has_cache=False), dice, Story(loop))
        try:
            with Watched(world):
                await rest(world)
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                world.crash_agent("h0")
                world.start_agent("h0")
                await rest(world)
                if is_told:
                    world.begin_lookup("w0", [1], 5.0)
                    await world.settle()
                leave(world, 1)
                is_wrong = is_told and leave is lose
                match = "is denied now" if is_asked else "is not listed any more"
                with pytest.raises(ViolationError, match=match) if is_wrong else contextlib.nullcontext():
                    if is_asked:
                        world.begin_lookup("w0", [1], 5.0)
                        await world.settle()
                    else:
                        world.check_closely()
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_rots_once_an_owner_was_asked_to_list_a_block_excuses_its_loss_and_nothing_before(
    monkeypatch: pytest.MonkeyPatch, *, is_asked: bool
) -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(hosts=1, drives=1, has_cache=False), dice, Story(loop))
        ((shard, superblock),) = world.drives.superblocks.items()
        flash, geometry = world.drives.flashes[superblock.drive], superblock.geometry
        commit = OwnerService._commit

        async def rotting(*given: Any) -> Any:
            said = await commit(*given)
            if is_asked:
                flash.rot(geometry.summary_offset(0))
            return said

        monkeypatch.setattr(OwnerService, "_commit", rotting)
        try:
            with Watched(world):
                await rest(world)
                if not is_asked:
                    flash.rot(geometry.summary_offset(0))
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                assert list(world.oracle.places(1)) == [shard]
                lose(world, 1)
                blank = np.zeros(geometry.summary_bytes, np.uint8)
                for segment in range(geometry.segments):
                    flash.land(flash.next_number(), geometry.summary_offset(segment), blank, lambda: False)
                assert excuse(world, 1) == "a spoilt listing, written over since" * is_asked
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


@pytest.mark.parametrize("is_dropped", [True, False])
def test_what_its_next_owner_lets_go_before_a_stopped_one_calls_it_committed_need_not_be_found(
    monkeypatch: pytest.MonkeyPatch, *, is_dropped: bool
) -> None:
    async def scenario() -> None:
        dice = random.Random(1)
        world = World(Setup(drives=1, has_cache=False), dice, Story(loop))
        history, commit = History(world, dice), OwnerService._commit

        async def stopping(*given: Any) -> Any:
            said = await commit(*given)
            history._stand_still(owner, 20.0)
            await asyncio.sleep(0)
            return said

        monkeypatch.setattr(OwnerService, "_commit", stopping)
        try:
            with Watched(world):
                await rest(world)
                (owner,) = (each for each in world.agents.values() if each.shards)
                (other,) = (each for each in world.agents.values() if not each.shards)
                world.begin_put(f"w{owner.name[1:]}", [1], 2.0, Ack.COMMITTED)
                await asyncio.sleep(15.0)
                ((shard, owned),) = other.shards.items()
                row = owned.core.index.find(rows([world.oracle.key_of(1)]))
                assert (owner.host.is_paused, row.tolist() != [-1], world.oracle.arrivals(1)) == (
                    True,
                    True,
                    0,
                )
                if is_dropped:
                    world.drives.flashes[owned.record.drive].rot(int(owned.core.index.offsets(row)[0]))
                    world.begin_get(f"w{other.name[1:]}", [1], 2.0)
                await world.settle()
                await rest(world)
                said = [line.split(None, 2)[1:] for line in world.story.lines]
                assert [owner.name, f"COMMITTED [1] in {shard}, epoch 1"] in said
                assert ([other.name, "DROPPED [1]"] in said) == is_dropped
                assert world.oracle.listed == [1] * (not is_dropped)
                await everything_is_found(world)
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_a_fabric_is_not_at_rest_where_an_agents_lease_is_about_to_end() -> None:
    async def scenario() -> None:
        world = World(Setup(drives=1), random.Random(1), Story(loop))
        try:
            with Watched(world):
                await rest(world)
                (owner,) = (each for each in world.agents.values() if each.shards)
                owner.membership.keeps_alive = False
                left_s = world.outside.store.lease_left_s(owner.id, owner.agent.start_id)
                await asyncio.sleep(left_s - 0.999)
                assert not restlessness(world)
                await rest(world)
                assert not restlessness(world)
                (claim,) = world.map.claims.values()
                assert claim.agent != owner.id
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_what_was_listed_by_a_shard_whose_recovery_comes_to_nothing_may_have_been_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        world = World(Setup(hosts=1, drives=1, has_cache=False), random.Random(1), Story(loop))
        is_newest, listed = ServedShards._is_newest, list[list[str]]()

        async def too_late_at_first(shards: ServedShards, serving: ServedShard) -> bool:
            is_good = await is_newest(shards, serving)
            listed.append([owned.record.id for owned in world.agents["h0"].shards.values()])
            return is_good and len(listed) > 1

        try:
            with Watched(world):
                await rest(world)
                world.begin_put("w0", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                world.crash_agent("h0")
                world.start_agent("h0")
                monkeypatch.setattr(ServedShards, "_is_newest", too_late_at_first)
                seen = Seen(world, [1, 2])
                await rest(world)
                assert listed == [["e0/d0/0"]] * 2
                lose(world, 1)
                assert seen.had() == {1, 2}
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())


def test_what_the_owner_before_lists_last_may_be_missed_until_the_next_one_has_adopted_it() -> None:
    async def scenario() -> None:
        world = World(Setup(drives=1, has_cache=False), random.Random(1), Story(loop))
        try:
            with Watched(world):
                await rest(world)
                (owner,) = (each for each in world.agents.values() if each.shards)
                (other,) = (each for each in world.agents.values() if not each.shards)
                world.begin_put(f"w{owner.name[1:]}", [2], 2.0, Ack.COMMITTED)  # and the volume is open
                await world.settle()
                owner.membership.cut()
                world.outside.store.lose_leases()
                await asyncio.sleep(REJOIN_WITHIN_S + 0.5)
                (owned,) = other.shards.values()
                assert (owned.epoch, owned.core.is_recovering, bool(owned.withheld)) == (2, False, True)
                world.begin_put(f"w{owner.name[1:]}", [1], 2.0, Ack.COMMITTED)
                await world.settle()
                assert world.oracle.listed == [2, 1]
                missed = (1, BlockState.MISS, Reason.NOT_FOUND)
                said = [world.calm._excuse(*missed, has_time=True, is_told=True)]
                await asyncio.sleep(11.0)
                said.append(world.calm._excuse(*missed, has_time=True, is_told=True))
                assert said == ["its next owner has not adopted it yet", ""]
        finally:
            world.end()

    with contextlib.closing(HostsLoop()) as loop:
        loop.run_until_complete(scenario())
