"""What a worker may say over the wire that an SDK never would: a typed refusal each, and no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    LAYOUT,
    SLOT_BYTES,
    Assembly,
    assembled,
    chain_of,
    until,
    with_cache,
)

from ostraca_dpu_agent.settings import MIB
from ostraca_fabric.connection import ClientConnection, connect
from ostraca_fabric.errors import ConnectError, MembershipError, TransportError
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.outcome import Ack, BlockState, PutState, Reason
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.wire.messages import (
    ArenaOffer,
    EndSession,
    Failure,
    Get,
    GetDone,
    Hello,
    Lookup,
    LookupDone,
    OpenVolume,
    Prefetch,
    PrefetchDone,
    Put,
    PutDone,
    VolumeOpened,
)

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1


def hello(*, with_arena: bool = True, tenant: str = "tenant") -> Hello:
    offers = (ArenaOffer("inline", 8 * MIB, 2 * MIB),) if with_arena else ()
    return Hello(1, 1, "worker", tenant, "", "test", arenas=offers)


@dataclass
class Wire:
    """A worker's bare connection, and the agent behind it."""

    fabric: Assembly
    address: str
    connection: ClientConnection

    async def ask(self, message: Any, **changed: Any) -> Any:
        numbered = msgspec.structs.replace(message, request=self.connection.next_request_id(), **changed)
        return await self.connection.ask(numbered, 5.0)

    async def refused(self, message: Any, **changed: Any) -> str:
        answer = await self.ask(message, **changed)
        assert isinstance(answer, Failure), answer
        return answer.code


@asynccontextmanager
async def wired(
    directory: Path, *, with_arena: bool = True, cache_bytes: int = 0, deadline_max_s: float = 600.0
) -> AsyncIterator[Wire]:
    address = f"unix://{directory}/agent.sock"
    settings = with_cache(cache_bytes)
    settings = replace(settings, flow=replace(settings.flow, deadline_max_s=deadline_max_s))
    async with assembled(settings, addresses=(address,)) as fabric:
        connection = await connect(address, hello(with_arena=with_arena))
        wire = Wire(fabric, address, connection)
        opened = await wire.ask(OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=True))
        assert isinstance(opened, VolumeOpened)
        assert opened.handle == 0
        yield wire
        connection.close()
        await connection.wait_closed()


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


GET = Get(0, 0, 2.0, chain_of([1, 2]), u32(BLOCK_BYTES, BLOCK_BYTES), u64(0, SLOT_BYTES), SLOT_BYTES)
PUT = Put(
    0,
    0,
    2.0,
    Ack.COMMITTED,
    chain_of([1, 2]),
    u32(BLOCK_BYTES, BLOCK_BYTES),
    bytes(32),
    u64(0, SLOT_BYTES),
    SLOT_BYTES,
)
LOOKUP = Lookup(0, 0, 2.0, chain_of([1, 2]))
PREFETCH = Prefetch(0, 0, 2.0, chain_of([1, 2]))


@pytest.mark.parametrize("message", [GET, PUT])
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"slot_bytes": 0}, "usage"),
        ({"slot_bytes": -4096}, "usage"),
        ({"slot_bytes": 1}, "usage"),
        ({"slot_bytes": 4097}, "usage"),
        ({"slot_bytes": SLOT_BYTES + 4096}, "usage"),
        ({"slot_bytes": 1 << 62}, "usage"),
        ({"slot_bytes": 4096}, "usage"),
        ({"lengths": u32(0, BLOCK_BYTES)}, "usage"),
        ({"lengths": u32(BLOCK_BYTES + 1, BLOCK_BYTES)}, "usage"),
        ({"lengths": u32(U32_MAX, U32_MAX)}, "usage"),
        ({"lengths": u32(BLOCK_BYTES)}, "malformed"),
        ({"lengths": b"123"}, "malformed"),
        ({"slots": u64(0)}, "malformed"),
        ({"handle": 1}, "unknown_volume"),
        ({"handle": -1}, "unknown_volume"),
        ({"handle": 1 << 62}, "unknown_volume"),
        ({"spans": ()}, "malformed"),
    ],
)
async def test_bad_numbers_are_refused_by_type(
    tmp_path: Path, message: Get | Put, changed: dict[str, object], code: str
) -> None:
    async with wired(tmp_path) as wire:
        assert await wire.refused(message, **changed) == code
        await wire.fabric.at_rest()


@pytest.mark.parametrize("ack", [-1, 0, 3, 1 << 40])
async def test_an_ack_that_is_no_state_is_refused(tmp_path: Path, ack: int) -> None:
    async with wired(tmp_path) as wire:
        assert await wire.refused(PUT, ack=ack) == "usage"


@pytest.mark.parametrize("tags", [b"", bytes(31), bytes(48)])
async def test_tags_that_do_not_fit_are_refused(tmp_path: Path, tags: bytes) -> None:
    async with wired(tmp_path) as wire:
        assert await wire.refused(PUT, tags=tags) == "malformed"


@pytest.mark.parametrize("slots", [u64(U64_MAX, 1 << 63), u64(8 * MIB, 8 * MIB - 4096), u64(1 << 62, 5)])
async def test_slots_outside_the_arena_move_nothing(tmp_path: Path, slots: bytes) -> None:
    async with wired(tmp_path) as wire:
        done = await wire.ask(PUT, slots=slots)
        assert isinstance(done, PutDone)
        assert set(done.reasons) == {Reason.TRANSFER_FAILED}
        got = await wire.ask(GET, slots=slots)
        assert isinstance(got, GetDone)
        assert set(got.states) == {BlockState.MISS}
        await wire.fabric.at_rest()


@pytest.mark.parametrize("message", [GET, PUT])
async def test_without_an_arena_nothing_is_begun(tmp_path: Path, message: Get | Put) -> None:
    async with wired(tmp_path, with_arena=False) as wire:
        assert await wire.refused(message) == "no_arena"
        assert wire.fabric.shard.core.counts().blocks_reserved == 0
        await wire.fabric.at_rest()


@pytest.mark.parametrize("message", [GET, PUT, LOOKUP, PREFETCH])
async def test_more_spans_than_blocks_allowed_are_refused(tmp_path: Path, message: Any) -> None:
    async with wired(tmp_path) as wire:
        empty = Span(b"", 32, b"", (), 0, 0)
        assert await wire.refused(message, spans=(empty,) * 5_000) == "usage"


@pytest.mark.parametrize("message", [GET, PUT, LOOKUP, PREFETCH])
async def test_engine_hashes_of_another_length_are_refused(tmp_path: Path, message: Any) -> None:
    async with wired(tmp_path) as wire:
        assert await wire.refused(message, spans=(Span(bytes(16), 8, bytes(16), (1, 1), 0, 0),)) == "usage"


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e300])
async def test_times_that_are_none_are_answered_for_in_time(tmp_path: Path, time_s: float) -> None:
    async with wired(tmp_path, cache_bytes=2 * MIB, deadline_max_s=0.2) as wire:
        for message in (GET, PUT, LOOKUP, PREFETCH):
            answer = await wire.ask(message, deadline_s=time_s)
            assert not isinstance(answer, Failure)
        assert not isinstance(await wire.ask(LOOKUP, pin_s=time_s), Failure)
        assert not isinstance(await wire.ask(GET, recompute_s=time_s), Failure)


async def test_empty_requests_have_empty_answers(tmp_path: Path) -> None:
    async with wired(tmp_path, cache_bytes=2 * MIB) as wire:
        nothing = {"spans": (), "lengths": b"", "slots": b""}
        assert (await wire.ask(GET, **nothing)).states == b""
        assert (await wire.ask(PUT, **nothing, tags=b"")).states == b""
        assert (await wire.ask(LOOKUP, spans=())).states == b""
        assert (await wire.ask(PREFETCH, spans=())).states == b""


async def test_a_membership_store_that_refuses_is_said_so_and_not_a_bug(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:

        def keep(_volumes: object) -> None:
            raise MembershipError("the disk is full")

        wire.fabric.membership.store.keep = keep
        assert await wire.refused(OpenVolume(0, "w", LAYOUT, BLOCK_BYTES, create=True)) == "membership"
        assert await wire.refused(OpenVolume(0, "w", LAYOUT, BLOCK_BYTES, create=False)) == "unknown_volume"


async def test_a_break_even_length_below_zero_is_refused(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        wrong = OpenVolume(0, "w", LAYOUT, BLOCK_BYTES, create=True, break_even_tokens=-1)
        assert await wire.refused(wrong) == "usage"


async def test_a_lookup_with_a_pin_asks_the_owner_also_for_cached_blocks(tmp_path: Path) -> None:
    async with assembled(with_cache(2 * MIB)) as fabric:
        worker = fabric.worker()
        await fabric.put(worker, [1, 2])
        counters, asked = fabric.shard.core.counters, 0
        for pin_s, more in ((0.0, 1), (1.0, 3)):
            fabric.requests += 1
            done = await fabric.data_path.lookup(
                worker, fabric.volume, Lookup(fabric.requests, 0, 1.0, chain_of([1, 2, 3]), pin_s)
            )
            assert isinstance(done, LookupDone)
            assert list(done.states) == [BlockState.HIT, BlockState.HIT, BlockState.MISS]
            asked += more
            assert counters.keys_asked == asked


async def test_when_a_session_ends_owners_and_the_cache_let_go_of_its_blocks_first(tmp_path: Path) -> None:
    async with wired(tmp_path, cache_bytes=MIB) as wire:
        fabric, worker = wire.fabric, wire.fabric.worker()
        await fabric.put(worker, [1, 2])
        for _ in range(2):
            await fabric.get(worker, [1, 2])
            found = await wire.ask(LOOKUP, pin_s=0.1)
            assert set(found.states) == {BlockState.HIT}
        keys = derive_keys(fabric.volume.secret, chain_of([1, 2]))
        index, cache = fabric.shard.core.index, fabric.context.staging.cache
        rows = cache._rows.find(keys)
        assert cache._order.uses[rows].tolist() == [2, 2]
        assert index.is_read(index.find(keys)).tolist() == [True, True]
        wire.connection.tell(EndSession(0, chain_of([2, 3])))
        assert set((await wire.ask(LOOKUP)).states) == {BlockState.HIT}, "it can be got all the same"
        assert cache._order.uses[rows].tolist() == [2, 1]
        assert index.is_read(index.find(keys)).tolist() == [True, False]


@pytest.mark.parametrize(
    "hint",
    [
        EndSession(1, chain_of([1])),
        EndSession(-1, chain_of([1])),
        EndSession(1 << 62, chain_of([1])),
        EndSession(0, ()),
        EndSession(0, chain_of([1]) * 16384),
        EndSession(0, (Span(bytes(16), 16, bytes(16), (1,), 0, 0),)),
    ],
)
async def test_a_hint_that_can_not_be_meant_is_passed_over(
    tmp_path: Path, hint: EndSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with wired(tmp_path) as wire:
        wire.connection.tell(hint)
        assert isinstance(await wire.ask(LOOKUP), LookupDone)
        assert not [record for record in caplog.records if record.exc_info]


async def test_a_prefetch_brings_blocks_into_dram_and_claims_no_more_than_fit() -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        done = await fabric.data_path.prefetch(worker, fabric.volume, Prefetch(1, 0, 2.0, chain_of([1])))
        assert (list(done.states), list(done.reasons)) == ([BlockState.DECLINED], [Reason.NO_SPACE])
    async with assembled(with_cache(4 * SLOT_BYTES)) as fabric:
        worker = fabric.worker()
        assert set((await fabric.put(worker, range(12))).states) == {PutState.COMMITTED}
        request = Prefetch(99, 0, 2.0, chain_of(range(13)))
        done = await fabric.data_path.prefetch(worker, fabric.volume, request)
        assert isinstance(done, PrefetchDone)
        hits = [number for number in range(13) if done.states[number] == BlockState.HIT]
        assert len(hits) == len(fabric.context.staging.cache) == 4
        assert done.states[12] == BlockState.MISS
        await fabric.at_rest()


async def test_a_worker_that_vanishes_in_mid_put_leaves_nothing_held(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        other = await connect(wire.address, hello())
        opened = msgspec.structs.replace(
            OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=False), request=other.next_request_id()
        )
        await other.ask(opened, 5.0)
        other.send(msgspec.structs.replace(PUT, request=other.next_request_id(), deadline_s=60.0))
        other.send(msgspec.structs.replace(GET, request=other.next_request_id(), deadline_s=60.0))
        other.close()
        await other.wait_closed()
        assert isinstance(await wire.ask(LOOKUP), LookupDone)
        await wire.fabric.at_rest()
        await until(lambda: wire.fabric.agent.status().workers == 1)


async def test_volumes_beyond_the_most_are_refused(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        wire.fabric.membership.store.volumes_max = 2
        opened = OpenVolume(0, "v", LAYOUT, BLOCK_BYTES, create=True)
        assert isinstance(await wire.ask(opened, name="w"), VolumeOpened)
        assert await wire.refused(opened, name="x") == "membership"
        assert isinstance(await wire.ask(opened, name="w"), VolumeOpened)


async def test_an_arena_is_attached_once_however_often_it_is_offered(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        attached: list[ArenaOffer] = []
        transport = wire.fabric.agent._transports["inline"]

        async def attach(offer: ArenaOffer, *_: object) -> None:
            attached.append(offer)
            raise TransportError("it can't be reached")

        transport.attach = attach  # type: ignore[method-assign,assignment]
        offer = ArenaOffer("inline", 8 * MIB, 2 * MIB)
        offers = (ArenaOffer("other", 1, 1), offer, *(replaced(offer, number) for number in range(1000)))
        with pytest.raises(ConnectError, match="transport"):
            await connect(wire.address, msgspec.structs.replace(hello(), arenas=offers))
        assert attached == [offer]


def replaced(offer: ArenaOffer, number: int) -> ArenaOffer:
    return msgspec.structs.replace(offer, base=number)


async def test_lookups_sent_together_are_answered_in_order_and_one_that_is_refused_hinders_no_other(
    tmp_path: Path,
) -> None:
    async with wired(tmp_path) as wire:
        await wire.fabric.put(wire.fabric.worker(), [1])
        requests = [
            msgspec.structs.replace(LOOKUP, request=100 + number, handle=handle)
            for number, handle in enumerate([0, 7, 0])
        ]
        waiting, order = [wire.connection.submit(request) for request in requests], list[int]()
        for each in waiting:
            each.add_done_callback(lambda done: order.append(done.result().request))
        first, refused, last = await asyncio.gather(*waiting)
        assert order == [100, 101, 102]
        assert isinstance(refused, Failure)
        assert refused.code == "unknown_volume"
        for found in (first, last):
            assert isinstance(found, LookupDone)
            assert list(found.states) == [BlockState.HIT, BlockState.MISS]
