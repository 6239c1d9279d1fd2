"""Pages of plain host memory on a real fabric, moved by blocking calls as of SGLang's threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from tests.sdk.connectors.sglang.plain_pools import (
    PAGE_TOKENS,
    PlainPool,
    opened,
    page_keys,
    rank_config,
    settings,
    token_indices,
)
from tests.sdk.scripted_agent import AgentConnection, agent_at
from tests.support.fabric.fabric_host import FabricThread
from tests.support.stalls import Stopwatch

from ostraca.connectors.sglang.host_pools import HostPool
from ostraca.connectors.sglang.page_store import PageStore
from ostraca.connectors.sglang.settings import SglangSettings
from ostraca.connectors.transfers.counters import (
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    REQUESTS,
    STORE_CHUNKS,
)
from ostraca_cli.testing import small_plan
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.wire.messages import Get, Lookup, Put, PutDone

COUNT = 12
KEYS = page_keys(COUNT)
PAGES = token_indices(*range(COUNT))
PART_BYTES = 16 << 10
"""Bytes of the keys of a page, and of its values, in pools with pages first."""

CALL_S = 0.5
"""Longest call without a wait, on a busy machine."""


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to be"
        threading.Event().wait(0.005)


def ready(store: PageStore) -> PageStore:
    until(lambda: not store.health.read_refusal)
    return store


class Rank:
    """Rank of SGLang with a pool of pages; use as a context manager."""

    def __init__(self, address: str, *, pool: PlainPool | None = None, **changes: object) -> None:
        config = {name: changes.pop(name) for name in list(changes) if name in vars(rank_config())}
        self.pool = pool or PlainPool(COUNT)
        self.store, self.host_pool = opened(settings(address, **changes), self.pool, rank_config(**config))
        self.form = self.host_pool.form

    def __enter__(self) -> Self:
        ready(self.store)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def put(self, begin: int = 0, end: int = COUNT) -> list[bool]:
        """Store pages of the prompt, from the same pages of the pool."""
        blocks = self.host_pool.blocks(token_indices(*range(begin, end)))
        return self.store.store(self.form, KEYS[begin:end], KEYS[:begin], blocks)

    def get(self, begin: int = 0, end: int = COUNT) -> list[bool]:
        blocks = self.host_pool.blocks(token_indices(*range(begin, end)))
        return self.store.load(self.form, KEYS[begin:end], KEYS[:begin], blocks)

    def find(self, begin: int = 0, end: int = COUNT) -> list[bool]:
        return self.store.look_up(self.form, KEYS[begin:end], KEYS[:begin])

    def has_used_the_arena(self) -> bool:
        client = self.store._link.client
        assert client is not None
        return bool(client._runtime.arena.array.any())

    def blank(self) -> None:
        self.pool.kv[...] = 0


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("block_bytes", [1 << 20, PART_BYTES, 5000])
def test_a_rank_loads_what_another_has_stored(fabric: FabricThread, layout: str, block_bytes: int) -> None:
    address = fabric.addresses[0]
    with Rank(address, pool=PlainPool(COUNT, layout=layout), block_bytes=block_bytes) as writer:
        content = writer.pool.fill(1)
        assert writer.put(0, 5) + writer.put(5) == [True] * COUNT
        assert writer.put() == [True] * COUNT, writer.store.counters.by_name()
        is_copied = layout == "layer_first" or block_bytes != PART_BYTES
        assert writer.has_used_the_arena() == is_copied
    with Rank(address, pool=PlainPool(COUNT, layout=layout), block_bytes=block_bytes) as reader:
        assert reader.find() == [True] * COUNT
        assert reader.find(7) == [True] * (COUNT - 7)
        assert reader.get(0, 3) + reader.get(3) == [True] * COUNT
        assert np.array_equal(reader.pool.kv, content)
        assert reader.store.counters.total[LOAD_BYTES, ""] == content.nbytes
        keys = [*KEYS[:2], *page_keys(2, prompt="other")]
        assert reader.store.look_up(reader.form, keys, None) == [True, True, False, False]
        assert reader.has_used_the_arena() == is_copied


def test_pages_under_a_store_are_loaded_after_its_end_alone(tmp_path: Path) -> None:
    held: list[tuple[AgentConnection, Put]] = []
    stored: list[bool] = []
    with (
        agent_at(tmp_path / "agent.sock") as agent,
        Rank(agent.address, block_bytes=PART_BYTES) as rank,
    ):
        content = rank.pool.fill(1)
        assert rank.put() == [True] * COUNT
        agent.script[Put] = lambda *request: held.append(request)
        thread = threading.Thread(target=lambda: stored.extend(rank.put(0, 2)))
        thread.start()
        until(lambda: bool(held))
        del agent.script[Put]
        assert rank.get(1) == [False] * (COUNT - 1)
        assert rank.store.counters.total[LOAD_CHUNKS, "error"] == 2 * (COUNT - 1)
        assert rank.get(2) == [True] * (COUNT - 2)
        ((connection, message),) = held
        connection.send(PutDone(message.request, bytes([PutState.STAGED] * 4), bytes(4)))
        thread.join()
        assert stored == [True] * 2
        rank.blank()
        assert rank.get() == [True] * COUNT
        assert np.array_equal(rank.pool.kv, content)


def test_a_pool_that_takes_the_place_of_another_is_used_in_place(fabric: FabricThread) -> None:
    with Rank(fabric.addresses[0], block_bytes=PART_BYTES) as rank:
        rank.host_pool = HostPool(rank.pool, rank.form.part_bytes, rank.form)
        assert rank.host_pool.rows is not None
        rank.store.register(rank.host_pool.rows)
        content = rank.pool.fill(1)
        assert rank.put() == [True] * COUNT
        rank.blank()
        assert rank.get() == [True] * COUNT
        assert np.array_equal(rank.pool.kv, content)
        assert not rank.has_used_the_arena()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "other"},
        {"tp_size": 2},
        {"revision": "2"},
        {"prefix_keys": False},
        {"block_bytes": 5000},
        {"pool": PlainPool(COUNT, layout="layer_first")},
    ],
)
def test_another_identity_finds_and_loads_nothing(fabric: FabricThread, changes: dict[str, object]) -> None:
    with Rank(fabric.addresses[0]) as writer:
        writer.pool.fill(1)
        assert writer.put() == [True] * COUNT
    with Rank(fabric.addresses[0], **changes) as reader:  # type: ignore[arg-type]
        reader.blank()
        assert reader.find() == reader.get() == [False] * COUNT
        assert not reader.pool.kv.any()


def test_tensor_parallel_ranks_have_pages_of_their_own_and_replicated_ranks_share(
    fabric: FabricThread,
) -> None:
    address = fabric.addresses[0]
    with Rank(address, tp_size=2) as first, Rank(address, tp_size=2, tp_rank=1) as second:
        first.pool.fill(1)
        assert first.put() == [True] * COUNT
        assert second.find() == [False] * COUNT
    mla: dict[str, object] = {"is_mla_model": True, "tp_size": 2}
    with Rank(address, **mla) as first, Rank(address, **mla, tp_rank=1) as second:  # type: ignore[arg-type]
        content = first.pool.fill(2)
        assert first.put() == [True] * COUNT
        assert second.get() == [True] * COUNT
        assert np.array_equal(second.pool.kv, content)


def test_a_page_with_a_damaged_block_fails_alone_and_is_absent_for_a_while(fabric: FabricThread) -> None:
    with Rank(fabric.addresses[0], block_bytes=20000, failed_hold_s=1.0) as rank:
        content = rank.pool.fill(1)
        assert rank.form.blocks_per_page == 2
        assert rank.put() == [True] * COUNT
        second_block = np.frombuffer(rank.pool.page(3)[20000:], np.uint8)
        fabric.damage(second_block)
        rank.blank()
        expected = [number != 3 for number in range(COUNT)]
        assert rank.get() == expected
        assert np.array_equal(rank.pool.kv[:, expected], content[:, expected])
        assert rank.find() == expected
        assert rank.store.counters.total[LOOKUP_CHUNKS, "failed_load"] >= 1
        assert rank.store.counters.total[LOAD_BYTES, ""] == (COUNT - 1) * rank.form.page_bytes


def test_an_engine_starts_without_a_fabric_and_uses_it_once_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric"))
    rank = Rank(f"unix://{tmp_path}/fabric/agent-0.sock")
    with closing(rank.store), caplog.at_level(logging.INFO, SglangSettings.LOGGER):
        until(lambda: "no fabric yet" in caplog.text)
        watch = Stopwatch()
        for _ in range(20):
            assert rank.put() == rank.find() == rank.get() == [False] * COUNT
        assert watch.took_s < CALL_S
        for metric in (STORE_CHUNKS, LOOKUP_CHUNKS, LOAD_CHUNKS):
            assert rank.store.counters.by_name()[f"{metric.name}_no_fabric"] == 20 * COUNT
        with host:
            ready(rank.store)
            assert rank.put() == [True] * COUNT
            rank.store.close()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1, [each.getMessage() for each in warnings]


def test_a_fabric_that_goes_away_costs_little_and_is_used_again(tmp_path: Path) -> None:
    host = FabricThread(small_plan(tmp_path / "fabric")).start()
    with Rank(host.addresses[0]) as rank:
        content = rank.pool.fill(1)
        assert rank.put() == [True] * COUNT
        host.stop()
        sent, watch = requests_sent(rank), Stopwatch()
        for _ in range(200):
            assert not any(rank.find() + rank.get() + rank.put())
        assert watch.took_s < 10, "600 calls without a fabric"
        assert requests_sent(rank) - sent < 40 + 20 * watch.took_s, (
            "a storm of requests to a fabric that is gone"
        )
        with host:
            rank.blank()
            until(lambda: all(rank.find()))
            until(lambda: all(rank.get()))
            assert np.array_equal(rank.pool.kv, content)
            rank.store.close()


def requests_sent(rank: Rank) -> int:
    return sum(rank.store.counters.total[REQUESTS, name] for name in ("lookup", "load", "store"))


def test_each_call_to_a_silent_agent_ends_by_its_deadline_and_then_at_once(tmp_path: Path) -> None:
    with (
        agent_at(tmp_path / "agent.sock") as agent,
        Rank(
            agent.address,
            lookup_deadline_s=0.3,
            load_deadline_s=0.3,
            store_deadline_s=0.3,
            backoff_s=30.0,
            backoff_max_s=30.0,
        ) as rank,
    ):
        for message in (Lookup, Get, Put):
            agent.script[message] = lambda *_: None
        for call in (rank.find, rank.get, rank.put, rank.put):
            watch = Stopwatch()
            assert call() == [False] * COUNT
            assert watch.took_s < 0.3 + CALL_S
        watch = Stopwatch()
        for call in (rank.find, rank.get, rank.put):
            assert call() == [False] * COUNT
        assert watch.took_s < 0.3, "a call waits although two were late"
        assert rank.store.counters.total[STORE_CHUNKS, "backoff"] == COUNT


def test_calls_of_three_threads_get_each_their_own_pages(fabric: FabricThread) -> None:
    with Rank(fabric.addresses[0]) as rank:
        content = rank.pool.fill(1)
        assert rank.put() == [True] * COUNT
        wrong: list[str] = []

        def store() -> None:
            other = PlainPool(COUNT)
            other.fill(2)
            addresses = rank.host_pool.__class__(other, rank.form.part_bytes, rank.form)
            for turn in range(20):
                keys = page_keys(COUNT, prompt=f"prompt {turn}")
                if rank.store.store(rank.form, keys, None, addresses.blocks(PAGES)) != [True] * COUNT:
                    wrong.append(f"store {turn}")

        def look_up() -> None:
            found = [rank.find(turn % COUNT) for turn in range(40)]
            wrong.extend("lookup" for each in found if not all(each))

        threads = [threading.Thread(target=store), threading.Thread(target=look_up)]
        for thread in threads:
            thread.start()
        for turn in range(40):
            rank.blank()
            assert rank.get() == [True] * COUNT, turn
            assert np.array_equal(rank.pool.kv, content)
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_change_of_the_weights_hides_earlier_pages(fabric: FabricThread, tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_text("first")
    with Rank(fabric.addresses[0], weights_file=str(file)) as rank:
        assert rank.put() == [True] * COUNT
        file.write_text("second")
        rank.store.hide_pages(b"unused")
        ready(rank.store)
        assert rank.find() == [False] * COUNT
        assert rank.put() == [True] * COUNT
        file.write_text("first")
        rank.store.hide_pages(b"unused")
        ready(rank.store)
        assert rank.find() == [True] * COUNT
        file.unlink()
        rank.store.hide_pages(b"without the file")
        assert rank.find() == [False] * COUNT


@pytest.mark.parametrize("block_bytes", [1 << 20, 5000])
def test_hidden_pages_are_found_by_other_engines_alone(fabric: FabricThread, block_bytes: int) -> None:
    address = fabric.addresses[0]
    with Rank(address, block_bytes=block_bytes) as other, Rank(address, block_bytes=block_bytes) as cleared:
        content = cleared.pool.fill(1)
        assert cleared.put() == [True] * COUNT
        cleared.store.hide_pages(b"1")
        assert cleared.find() == [False] * COUNT
        assert other.find() == [True] * COUNT
        changed = cleared.pool.fill(2)
        assert cleared.put(0, 5) + cleared.put(5) == [True] * COUNT
        cleared.blank()
        assert cleared.find(3) == [True] * (COUNT - 3)
        assert cleared.get() == other.get() == [True] * COUNT
        assert np.array_equal(cleared.pool.kv, changed)
        assert np.array_equal(other.pool.kv, content)
        cleared.store.hide_pages(b"2")
        assert cleared.find() == [False] * COUNT


def test_ranks_with_common_pages_share_a_generation(fabric: FabricThread) -> None:
    mla: dict[str, object] = {"is_mla_model": True, "tp_size": 2}
    with (
        Rank(fabric.addresses[0], **mla) as first,  # type: ignore[arg-type]
        Rank(fabric.addresses[0], **mla, tp_rank=1) as second,  # type: ignore[arg-type]
    ):
        assert first.put() == [True] * COUNT
        for rank in (first, second):
            rank.store.hide_pages(b"1")
        assert second.find() == [False] * COUNT
        assert first.put() == [True] * COUNT
        assert second.get() == [True] * COUNT


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_flat_pages_are_loaded_by_engines_with_flat_pages_alone(fabric: FabricThread, layout: str) -> None:
    pool = PlainPool(COUNT, layout=layout)
    pool.fill(1)
    pages = [pool.get_data_page(number * PAGE_TOKENS) for number in range(COUNT)]
    backend_settings = settings(fabric.addresses[0], prefix_keys=False)
    store, host_pool = opened(backend_settings, pool, is_flat=True)
    with closing(ready(store)):
        assert store.store(host_pool.form, KEYS, None, host_pool.flat_blocks(pages)) == [True] * COUNT
    store, host_pool = opened(backend_settings, PlainPool(COUNT, layout=layout), is_flat=True)
    with closing(ready(store)):
        filled = [pool.get_dummy_flat_data_page() for _ in KEYS]
        assert store.load(host_pool.form, KEYS, None, host_pool.flat_blocks(filled)) == [True] * COUNT
        for page, expected in zip(filled, pages, strict=True):
            assert np.array_equal(page.array, expected.array)
    with Rank(fabric.addresses[0], pool=pool, prefix_keys=False) as by_parts:
        assert by_parts.find() == [False] * COUNT


def test_calls_after_the_close_and_without_pages_fail_at_once(fabric: FabricThread) -> None:
    with Rank(fabric.addresses[0]) as rank:
        assert rank.store.look_up(rank.form, [], None) == []
        rank.store.close()
        assert rank.put() == rank.get() == rank.find() == [False] * COUNT
