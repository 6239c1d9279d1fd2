"""Feed of one agent for a router: pages put at any agent, until the fabric loses them."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.fabric.sockets.test_zmtp_publisher import read_frame, subscriber
from tests.support.agent.assembly import (
    BLOCK_BYTES,
    LAYOUT,
    SETTINGS,
    TENANT,
    assembled,
    beside,
    chain_of,
    until,
)

from ostraca_dpu_agent.agent import Agent
from ostraca_dpu_agent.datapath.names import BlockNames
from ostraca_dpu_agent.feed import router_feed
from ostraca_dpu_agent.settings import RouterFeedSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.overrides import Overrides, Switch
from ostraca_fabric.model.volume import COUNT_MAX, VolumeRecord
from ostraca_fabric.tables.digests import derive_keys
from ostraca_fabric.wire.messages import NamesQuery

KEEPING = replace(SETTINGS, router_feed=RouterFeedSettings(volume="tenant/v", round_s=0.05))
FEEDING = replace(KEEPING, router_feed=replace(KEEPING.router_feed, bind="tcp://127.0.0.1:0"))


class RouterView:
    """View of a router of the pages in the cache."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._last = 0
        self.pages: set[int] = set()

    async def follow(self) -> None:
        """Take the next message; forget all pages if another was missed."""
        frames = [await read_frame(self._reader) for _ in range(3)]
        number = int.from_bytes(frames[1][1], "big")
        if number != self._last + 1:
            self.pages.clear()
        self._last = number
        for event in msgspec.msgpack.decode(frames[2][1])[1]:
            page = int(event["object_key"].removeprefix("ostraca_").removesuffix("__k"), 16)
            (self.pages.add if event["event_type"] == "stored" else self.pages.discard)(page)

    async def until(self, pages: set[int]) -> None:
        async with asyncio.timeout(20):
            while self.pages != pages:
                await self.follow()


async def view_of(agent: Agent) -> RouterView:
    feed = agent._router_feed
    assert feed is not None
    await until(lambda: bool(feed.address))
    return RouterView(*await subscriber(feed._publisher))


async def test_routers_hear_of_pages_put_at_another_agent_and_of_their_eviction() -> None:
    async with assembled(KEEPING, segments=3) as fabric, beside(fabric, FEEDING) as other:
        worker = fabric.worker()
        view = await view_of(other)
        await fabric.put(worker, range(3))
        await view.until({0, 1, 2})
        late = await view_of(other)
        await late.until({0, 1, 2})
        for first in range(100, 160, 10):
            await fabric.put(worker, range(first, first + 10))
        await until(lambda: fabric.shard.core.counts().segments_evicted > 0)
        listed = fabric.shard.core.index

        def kept() -> set[int]:
            names = [*range(3), *range(100, 160)]
            spans = chain_of(names)
            found, _ = listed.has(derive_keys(fabric.volume.secret, spans), is_counted=False)
            return {name for name, is_there in zip(names, found.tolist(), strict=True) if is_there}

        assert not {0, 1, 2} & kept()
        await view.until(kept())
        await late.until(kept())
        view.writer.close()
        late.writer.close()
        (counted,) = (each for each in other.status().operations if each.operation == "recheck")
        assert {(count.state, count.reason) for count in counted.blocks} == {
            ("HIT", "NONE"),
            ("MISS", "NOT_FOUND"),
        }


@pytest.mark.parametrize("switch", [Switch.OFF, Switch.SHADOW])
async def test_pages_of_a_volume_that_is_not_served_are_withdrawn_until_it_is(switch: Switch) -> None:
    async with assembled(FEEDING) as fabric:
        await fabric.put(fabric.worker(), range(3))
        view = await view_of(fabric.agent)
        await view.until({0, 1, 2})
        fabric.membership.rule(Overrides(switches={(TENANT, "v"): switch}))
        await view.until(set())
        fabric.membership.rule(Overrides())
        await view.until({0, 1, 2})
        view.writer.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"volume": "v"},
        {"volume": "a/b/c"},
        {"bind": "tcp://127.0.0.1:0"},
        {"volume": "tenant/v", "bind": "unix:///run/feed"},
        {"volume": "tenant/v", "round_s": 0.0},
    ],
)
def test_settings_without_a_volume_or_address_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"volume|bind|round_s"):
        RouterFeedSettings(**wrong)


async def test_a_port_in_use_stops_no_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_feed, "_BIND_RETRY_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        async with assembled(replace(FEEDING, router_feed=replace(FEEDING.router_feed, bind=bind))) as fabric:
            await until(lambda: "No pages are announced" in caplog.text)
            taken.close()
            view = await view_of(fabric.agent)
            await fabric.put(fabric.worker(), range(3))
            await view.until({0, 1, 2})
            view.writer.close()


async def test_an_agent_without_a_feed_keeps_no_names() -> None:
    async with assembled() as fabric:
        await fabric.put(fabric.worker(), range(3))
        answer = fabric.data_path.names.answer(NamesQuery(1, 1.0, "tenant/v", 0))
        assert answer.spans == ()


async def test_names_are_bounded_and_numbered_across_restarts() -> None:
    async with assembled() as fabric:
        names = BlockNames("tenant/v", names_max=4, first=100)
        for number in range(6):
            names.record(fabric.volume, chain_of([number]))

        def ask(first: int) -> tuple[int, list[int]]:
            answer = names.answer(NamesQuery(1, 1.0, "tenant/v", first))
            return answer.next, [int.from_bytes(span.hashes, "big") for span in answer.spans]

        assert ask(0) == ask(50) == (106, [2, 3, 4, 5]), "the oldest are gone"
        assert ask(104) == (106, [4, 5])
        assert ask(106) == (106, [])
        assert ask(107) == (106, [2, 3, 4, 5]), "a number of an agent with a clock ahead"
        assert names.answer(NamesQuery(1, 1.0, "tenant/other", 0)).spans == ()
        names.record(fabric.volume, [*chain_of([]), *chain_of([9])])
        assert ask(106) == (107, [9]), "a span without blocks takes no room"


async def test_a_volume_of_absurdly_many_ranks_stops_no_agent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_feed, "_TURN_S", 0.01)
    caplog.set_level(logging.DEBUG, router_feed.__name__)
    feed = replace(FEEDING.router_feed, volume="tenant/wide")
    async with assembled(replace(FEEDING, router_feed=feed)) as fabric:
        wide = replace(LAYOUT, tensor_parallel=COUNT_MAX)
        record = VolumeRecord(TENANT, "wide", wide, BLOCK_BYTES)
        await fabric.membership.create_volume(record)
        await until(lambda: "a page has 4294967295 blocks" in caplog.text)
