"""Storage plug-in under LMCache's own engine and storage manager, on a real fabric."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.sdk.connectors.lmcache.server_steps import BLOCK_BYTES, CHUNK_TOKENS, LAYERS, OBJECT_BYTES
from tests.sdk.scripted_agent import AgentConnection, agent_at
from tests.support.fabric.fabric_host import FabricThread, content
from tests.support.stalls import Stopwatch

from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca_cli.testing import small_plan
from ostraca_fabric.wire.messages import Put

if TYPE_CHECKING:
    from tests.sdk.connectors.lmcache.cpu_engine import CpuEngine

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.skipif(
        importlib.util.find_spec("lmcache") is None,
        reason="LMCache is not installed here; make test-lmcache makes an environment that has it",
    ),
    # LMCache and numba warn at import, not about a plug-in.
    pytest.mark.filterwarnings("ignore"),
]

COUNT = 6
TOKENS = list(range(100, 100 + COUNT * CHUNK_TOKENS))
BLOCKS = 3 * COUNT
CALL_S = 3.0
PAGE = (Path(__file__).parents[4] / "docs" / "howto" / "engines" / "lmcache.md").read_text()


def engine_at(address: str, **options: Any) -> CpuEngine:
    from tests.sdk.connectors.lmcache.cpu_engine import CpuEngine

    return CpuEngine(address, **options)


def fill(engine: CpuEngine) -> NDArray[np.uint8]:
    """Give the prompt's pages their content, and return a copy."""
    pages = content(COUNT, block_bytes=OBJECT_BYTES)
    engine.pages.memory[:COUNT] = pages
    return pages


def _until(is_so: Callable[[], bool]) -> None:
    from tests.sdk.connectors.lmcache.cpu_engine import until

    until(is_so)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


@pytest.fixture
def engine(fabric: FabricThread) -> Iterator[CpuEngine]:
    with engine_at(fabric.addresses[0]) as started:
        yield started.wait_for_the_fabric()


@pytest.mark.parametrize("local_cpu", [False, True])
def test_a_second_engine_loads_what_the_first_has_computed(fabric: FabricThread, local_cpu: bool) -> None:
    with engine_at(fabric.addresses[0]) as engine:
        pages = fill(engine.wait_for_the_fabric())
        engine.store_and_find([*TOKENS, 1, 2, 3])
        assert engine.counters["store_chunks_staged"] >= BLOCKS
    with engine_at(fabric.addresses[0], lmcache={"local_cpu": local_cpu}) as engine:
        engine.wait_for_the_fabric()
        assert engine.look_up([*TOKENS, 7]) == len(TOKENS)
        assert engine.load(TOKENS) == [True] * COUNT
        assert np.array_equal(engine.pages.memory[:COUNT], pages)
        assert engine.counters["load_bytes"] == pages.nbytes
        engine.pages.memory[:] = 0
        mask = engine.engine.retrieve(TOKENS)
        assert mask.all()
        assert np.array_equal(engine.pages.memory[:COUNT], pages)
        assert (engine.counters["load_bytes"] == pages.nbytes) == local_cpu, (
            "LMCache's own memory comes first"
        )


@pytest.mark.parametrize(
    ("changes", "request_configs"),
    [
        ({"layers": 2 * LAYERS}, {}),
        ({"dtype": "float16"}, {}),
        ({"revision": "2"}, {}),
        ({"block_bytes": 128 << 10}, {}),
        ({}, {"lmcache.tag.adapter": "other"}),
    ],
)
def test_another_layout_revision_or_tag_is_a_miss(
    engine: CpuEngine, fabric: FabricThread, changes: dict[str, Any], request_configs: dict[str, str]
) -> None:
    fill(engine)
    engine.store_and_find(TOKENS, request_configs={"lmcache.tag.adapter": "first"})
    with engine_at(fabric.addresses[0], **changes) as other:
        other.wait_for_the_fabric()
        configs = request_configs or {"lmcache.tag.adapter": "first"}
        assert other.look_up(TOKENS, request_configs=configs) == 0
        assert other.load(TOKENS, request_configs=configs) == [False] * COUNT
        assert not other.pages.memory.any()


def test_a_chunk_that_is_not_whole_is_not_stored(
    fabric: FabricThread, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, LmcacheSettings.LOGGER),
        engine_at(fabric.addresses[0], lmcache={"save_unfull_chunk": True}) as engine,
    ):
        fill(engine.wait_for_the_fabric())
        tokens = [*TOKENS, 1, 2, 3]
        engine.store_and_find(tokens)
        assert engine.load(tokens) == [True] * COUNT + [False]
    assert caplog.text.count("are not stored, only of") == 1


def test_a_damaged_chunk_ends_the_prefix_and_is_not_found_again(
    engine: CpuEngine, fabric: FabricThread
) -> None:
    pages = fill(engine)
    engine.store_and_find(TOKENS)
    fabric.damage(pages[2][:BLOCK_BYTES])
    engine.pages.memory[:] = 0
    assert engine.load(TOKENS) == [True] * 2 + [False] * (COUNT - 2)
    assert np.array_equal(engine.pages.memory[:2], pages[:2])
    assert not engine.pages.memory[2:].any()
    assert engine.look_up(TOKENS) == 2 * CHUNK_TOKENS
    engine.wait_for_stores()


def test_an_engine_starts_without_a_fabric_and_uses_a_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_at(f"unix://{tmp_path}/fabric/agent-0.sock") as engine:
        pages, watch = fill(engine), Stopwatch()
        engine.store(TOKENS)
        assert engine.look_up(TOKENS) == 0
        assert engine.load(TOKENS) == [False] * COUNT
        assert watch.took_s < CALL_S
        assert engine.counters["store_chunks_no_fabric"] == BLOCKS
        with FabricThread(small_plan(tmp_path / "fabric")):
            engine.wait_for_the_fabric().store_and_find(TOKENS)
            engine.pages.memory[:] = 0
            assert engine.load(TOKENS) == [True] * COUNT
            assert np.array_equal(engine.pages.memory[:COUNT], pages)
    ours = [each for each in caplog.records if each.name == LmcacheSettings.LOGGER]
    assert sum(each.levelno >= logging.WARNING for each in ours) == 1


@pytest.mark.parametrize(
    ("lmcache", "settings", "words"),
    [
        ({}, {"lookup_deadline": 1}, "did you mean lookup_deadline_s"),
        ({}, {"weights_file": "/absent"}, "weights_file /absent can't be read"),
        ({"use_layerwise": True}, {}, "does not work with LMCache's use_layerwise"),
        ({"enable_blending": True}, {}, "does not work with LMCache's enable_blending"),
    ],
)
def test_with_a_wrong_configuration_the_log_says_why_and_the_engine_serves(
    caplog: pytest.LogCaptureFixture, lmcache: dict[str, object], settings: dict[str, object], words: str
) -> None:
    with engine_at("unix:///nobody.sock", lmcache=lmcache, **settings) as engine:
        assert list(engine.manager.storage_backends) == ["LocalCPUBackend"]
    (line,) = errors(caplog)
    assert line.startswith("Failed to create backend ostraca: ")
    assert words in line


def test_lmcache_reads_the_file_on_the_page(tmp_path: Path) -> None:
    from lmcache.v1.config import LMCacheEngineConfig

    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "lmcache.yaml"
    file.write_text(block)
    config = LMCacheEngineConfig.from_file(str(file))
    assert config.storage_plugins == ["ostraca"]
    assert config.pre_caching_hash_algorithm == "sha256_cbor"
    with engine_at("unix:///nobody.sock", lmcache={"extra_config": config.extra_config}) as engine:
        assert engine.plugin is not None


def test_stores_beyond_the_limit_are_dropped_and_free_their_memory(fabric: FabricThread) -> None:
    with engine_at(fabric.addresses[0], stores_inflight_chunks_max=6) as engine:
        fill(engine.wait_for_the_fabric())
        engine.store(TOKENS)
        assert engine.counters["store_chunks_too_many"] == BLOCKS - 6
        _until(lambda: engine.look_up(TOKENS) == 2 * CHUNK_TOKENS)


def test_a_load_waits_for_memory_until_its_deadline_and_loads_what_fits(fabric: FabricThread) -> None:
    with engine_at(fabric.addresses[0]) as engine:
        pages = fill(engine.wait_for_the_fabric())
        engine.store_and_find(TOKENS)
    with engine_at(fabric.addresses[0], host_pages=4, load_deadline_s=1.0) as engine:
        engine.wait_for_the_fabric()
        watch = Stopwatch()
        assert engine.load(TOKENS) == [True] * 4 + [False] * 2
        assert 0.9 < watch.took_s < CALL_S
        assert np.array_equal(engine.pages.memory[:4], pages[:4])
        kept = [engine.manager.allocate(*whole_chunk(engine), busy_loop=False) for _ in range(2)]
        threading.Timer(0.2, lambda: [each.ref_count_down() for each in kept]).start()
        assert engine.load(TOKENS[: 4 * CHUNK_TOKENS]) == [True] * 4, "memory came in time"


def whole_chunk(engine: CpuEngine) -> tuple[Any, Any]:
    return engine.engine.metadata.get_shapes(), engine.engine.metadata.get_dtypes()


@pytest.mark.parametrize(("deadline_s", "outcome"), [(5.0, "committed"), (0.1, "disconnected")])
def test_stores_under_way_end_before_lmcache_frees_their_memory(
    tmp_path: Path, deadline_s: float, outcome: str
) -> None:
    def answer(connection: AgentConnection, message: Put) -> None:
        if not connection.is_gone.wait(0.5):
            type(agent).usual(connection, message)

    with agent_at(tmp_path / "agent.sock") as agent:
        agent.script[Put] = answer
        engine = engine_at(agent.address, close_deadline_s=deadline_s).wait_for_the_fabric()
        fill(engine)
        engine.engine.store(TOKENS)
        _until(lambda: bool(agent.seen_of(Put)))
        allocator, counters = engine.host_memory.memory_allocator, engine.plugin._tasks.counters
        free, under_way = allocator.close, []

        def close() -> None:
            under_way.append(allocator.pin_allocator.num_active_allocations)
            free()

        allocator.close = close
        engine.close()
        assert under_way == [0]
        assert counters.by_name()[f"store_chunks_{outcome}"] == BLOCKS


def test_an_engine_that_loads_asynchronously_gets_the_prefix(fabric: FabricThread) -> None:
    class LookupAnswers:
        def __init__(self) -> None:
            self.found: dict[str, int] = {}

        def send_response_to_scheduler(self, lookup_id: str, tokens: int) -> None:
            self.found[lookup_id] = tokens

    answers = LookupAnswers()
    asynchronous: dict[str, object] = {"enable_async_loading": True}
    with engine_at(fabric.addresses[0], async_server=answers, lmcache=asynchronous) as engine:
        pages = fill(engine.wait_for_the_fabric())
        engine.store_and_find(TOKENS)
        engine.pages.memory[:] = 0
        absent = [*TOKENS, *range(CHUNK_TOKENS)]
        engine.engine.async_lookup_and_prefetch("one", tokens=absent, pin=True)
        _until(lambda: "one" in answers.found)
        assert answers.found == {"one": len(TOKENS)}
        assert engine.engine.retrieve(TOKENS, req_id="one").all()
        assert np.array_equal(engine.pages.memory[:COUNT], pages)
        fabric.damage(pages[2][:BLOCK_BYTES])
        engine.engine.async_lookup_and_prefetch("two", tokens=TOKENS, pin=True)
        _until(lambda: "two" in answers.found)
        assert answers.found["two"] == 2 * CHUNK_TOKENS
        engine.engine.cleanup_memory_objs("two")
        engine.wait_for_stores()


def test_a_scheduler_without_host_memory_looks_up(engine: CpuEngine) -> None:
    from ostraca.connectors.lmcache import OstracaStorageBackend

    fill(engine)
    engine.store_and_find(TOKENS)
    metadata = engine.engine.metadata
    keys = [key for _, _, key in engine.engine.token_database.process_tokens(tokens=TOKENS)]
    with pytest.raises(Exception, match="set max_local_cpu_size above zero"):
        OstracaStorageBackend(engine.engine.config, metadata, None)
    metadata.role = "scheduler"
    scheduler = OstracaStorageBackend(engine.engine.config, metadata, None)
    try:
        _until(lambda: scheduler.batched_contains(keys, pin=True) == COUNT)
        assert scheduler.pin(keys[0])
        assert scheduler.unpin(keys[0])
        assert not scheduler.exists_in_put_tasks(keys[0])
        assert scheduler.get_blocking(keys[0]) is None
        assert scheduler.batched_remove(keys) == 0, "the chunks are still there"
        assert scheduler.contains(keys[0])
    finally:
        scheduler.close()
