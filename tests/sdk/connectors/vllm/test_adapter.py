"""Adapter class, called with vLLM's own types.

The calls are those of vLLM's tiering manager, for each installed release. No engine runs here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.fabric.fabric_host import FabricThread, content

from ostraca.connectors.kv_identity.identity import volume_name
from ostraca.connectors.vllm.settings import LOGGER
from ostraca_cli.testing import small_plan

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm makes an environment that has it",
    ),
    # vLLM warns of much when it is imported, none of which is about a tier.
    pytest.mark.filterwarnings("ignore"),
]

ROWS = 64
ROW_BYTES = 64 << 10
TOKENS = 16
PATIENCE_S = 120.0
"""Longest wait; on a busy machine, an attempt to reach the fabric may fail after 5 s."""


def keys(count: int) -> list[bytes]:
    return [hashlib.sha256(f"{number}".encode()).digest() + bytes(4) for number in range(count)]


def known_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those of *values* that this release's dataclass has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def offloading_spec(
    *, publishes_events: bool = False, layer: str = "layer.0", row_bytes: int = ROW_BYTES
) -> Any:
    from vllm.v1.kv_offload import config as kinds

    group = {"tokens_per_block": TOKENS, "layer_names": (layer,), "group_id": 0}
    parallel = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": True,
    }
    config = kinds.OffloadingConfig(
        groups=(kinds.OffloadingGroupConfig(**known_fields(kinds.OffloadingGroupConfig, group)),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=publishes_events,
        extra_config={},
        engine_id="engine",
        model=kinds.OffloadingModelConfig(
            **known_fields(kinds.OffloadingModelConfig, {"name": "test/model", "dtype": "bfloat16"})
        ),
        cache=kinds.OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=kinds.OffloadingParallelConfig(**known_fields(kinds.OffloadingParallelConfig, parallel)),
    )
    return SimpleNamespace(config=config, replicated_layout=False)


class Manager:
    """Stand-in for vLLM's tiering manager."""

    def __init__(
        self, address: str, *, publishes_events: bool = False, layer: str = "layer.0", **settings: Any
    ) -> None:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.rows = np.zeros((ROWS, ROW_BYTES), np.int8)
        self.entry = {
            "type": "OstracaTier",
            "module_path": "ostraca.connectors.vllm",
            "agents": address,
            "arena_bytes": 32 << 20,
            "transports": ["inline"],
            "lookup_deadline_s": 10.0,
            "backoff_s": 0.1,
            "backoff_max_s": 0.2,
            "connect_retry_s": 0.05,
        } | settings
        self.view = self.rows.data
        spec = offloading_spec(publishes_events=publishes_events, layer=layer)
        self.tier = SecondaryTierFactory.create_secondary_tier(self.entry, self.view, spec)
        self._jobs = 0

    def begin(self, request: str, chunks: Sequence[bytes], **fields: Any) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(request, **fields)
        if hasattr(context, "set_offload_key_position"):
            for number, key in enumerate(chunks):
                context.set_offload_key_position(key, (number + 1) * TOKENS)
        self.tier.on_new_request(context)
        return context

    def look_up(self, chunks: Sequence[bytes], context: Any) -> list[str]:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            found = [self.tier.lookup(key, context).name for key in chunks]
            self.tier.on_schedule_end(None)
            if "RETRY" not in found:
                return found
            assert time.monotonic() < until_s
            threading.Event().wait(0.001)
            assert list(self.tier.get_finished_jobs()) == []

    def until_hit(self, chunks: Sequence[bytes]) -> Any:
        """Ask in new requests until all is there; return the last one's context."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            context = self.begin(f"{until_s}", chunks)
            if set(self.look_up(chunks, context)) == {"HIT"}:
                return context
            self.tier.on_request_finished(context)
            threading.Event().wait(0.001)
        raise AssertionError("what was stored is not found")

    def move(self, chunks: Sequence[bytes], context: Any, first_row: int, *, is_load: bool) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        rows = np.arange(first_row, first_row + len(chunks), dtype=np.int32)
        told = {
            "job_id": self._jobs,
            "keys": list(chunks),
            "chunk_ids": rows,
            "block_ids": rows,
            "is_promotion": is_load,
            "req_context": context,
        }
        job = TransferJob(**known_fields(TransferJob, told))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        assert self.tier.has_pending_work()
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        assert self.tier.has_pending_work() == bool(self.tier._tier._news.unsent)
        return result


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Lines of the tier in the log; vLLM's loggers may keep records from caplog."""
    importlib.import_module("vllm.logger")  # its first import removes all handlers
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(handler)
    yield said
    logging.getLogger(LOGGER).removeHandler(handler)


@contextmanager
def managed(directory: Path, **options: Any) -> Iterator[Manager]:
    with FabricThread(small_plan(directory / "fabric")) as fabric:
        made = Manager(fabric.addresses[0], **options)
        yield made
        made.tier.shutdown()
        made.view.release()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with managed(tmp_path) as made:
        yield made


def stored(manager: Manager, count: int = 8) -> list[bytes]:
    chunks = keys(count)
    manager.rows[:count] = content(count, block_bytes=ROW_BYTES).view(np.int8)
    tier, until_s = manager.tier._tier, time.monotonic() + PATIENCE_S
    while (
        not tier.is_linked
        or not manager.move(chunks, manager.begin("writer", chunks), 0, is_load=False).success
    ):
        assert time.monotonic() < until_s, f"no fabric, or {tier.counters.drops()}"
        threading.Event().wait(0.001)  # lets the fabric's threads run
    return chunks


def test_what_the_manager_stores_it_finds_and_loads(manager: Manager) -> None:
    chunks = stored(manager)
    context = manager.until_hit(chunks)
    result = manager.move(chunks, context, 32, is_load=True)
    assert result.success
    assert np.array_equal(manager.rows[32:40], manager.rows[:8])


def test_of_a_load_that_fails_in_part_the_keys_that_succeeded_are_told(manager: Manager) -> None:
    chunks = stored(manager)
    manager.until_hit(chunks)
    longer = [*chunks, *keys(9)[8:]]
    context = manager.begin("reader", longer)
    result = manager.move(longer, context, 32, is_load=True)
    assert (result.success, set(result.successful_keys)) == (False, set(chunks))
    assert manager.look_up(longer, context)[8] == "MISS"


def test_hints_of_a_request_reach_the_fabric(manager: Manager) -> None:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="this release has no hints")
    chunks = stored(manager)
    types = ("kv.prefetch", "kv.deref", "kv.unknown")
    actions = [kv_hints.KvHintAction(name, name, "1.0", {}) for name in types]
    envelope = kv_hints.KvHintsEnvelope("0.1", "message", actions)
    context = manager.begin("hinted", chunks, kv_hints=envelope)
    manager.tier.on_schedule_end(None)
    manager.tier.on_request_finished(context)
    counted = manager.tier.get_stats().reduce()
    for operation in ("prefetch", "end_session"):
        assert counted[f"vllm:kv_offload_ostraca_requests:('{operation}',)"] == 1


@pytest.mark.parametrize("locality", ["", "LOCAL", "REMOTE"])
def test_stored_chunks_are_announced_with_the_locality_that_is_set(tmp_path: Path, locality: str) -> None:
    from vllm.v1.kv_offload.base import Locality, Medium

    options = {"locality": locality} if locality else {}
    with managed(tmp_path, publishes_events=True, enable_kv_events=True, **options) as manager:
        chunks = stored(manager)
        (event,) = manager.tier.take_events()
        assert (event.keys, event.medium, event.removed) == (chunks, Medium.STORAGE, False)
        assert event.locality == (Locality(locality) if locality else None) == manager.tier.locality
        assert getattr(event, "ownership", None) is None, "Dynamo's router drops events with an owner"


def test_without_vllms_own_events_nothing_is_announced(tmp_path: Path, lines: list[str]) -> None:
    with managed(tmp_path, enable_kv_events=True) as manager:
        stored(manager)
        assert list(manager.tier.take_events()) == []
        assert any("--kv-events-config" in line for line in lines)


def test_the_plug_in_makes_the_tier_known_by_its_type(tmp_path: Path) -> None:
    pyproject = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    ((name, target),) = pyproject["project"]["entry-points"]["vllm.general_plugins"].items()
    register = importlib.metadata.EntryPoint(name, target, "vllm.general_plugins").load()
    for _ in range(2):
        register()
    with managed(tmp_path, type="ostraca", module_path=None) as manager:
        assert type(manager.tier).__name__ == "OstracaTier"
        assert manager.tier.tier_type == "ostraca"


def test_metrics_are_declared_and_counted_under_the_same_names(manager: Manager) -> None:
    chunks = stored(manager)
    manager.until_hit(chunks)
    declared = type(manager.tier).build_metric_definitions(manager.entry)
    counted = manager.tier.get_stats().reduce()
    assert {name.split(":(")[0] for name in counted} <= declared.keys()
    assert counted["vllm:kv_offload_ostraca_store_chunks:('staged',)"] == len(chunks)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.name", "test/other"),
        ("model.dtype", "float8_e4m3fn"),
        ("parallel.tp_size", 2),
        ("parallel.pp_size", 2),
        ("parallel.pcp_size", 2),
        ("parallel.dcp_size", 2),
        ("cache.blocks_per_chunk", 2),
        ("groups.tokens_per_block", 2 * TOKENS),
        ("groups.layer_names", ("layer.1",)),
        ("groups.group_id", 1),
        ("kv_cache_layout", "HND"),
        ("canonical_layout", True),
    ],
)
def test_whatever_vllm_tells_of_its_kv_cache_decides_the_volume(path: str, value: object) -> None:
    from ostraca.connectors.vllm.adapter import engine_identity

    def volume(config: Any) -> str:
        identity = engine_identity(SimpleNamespace(config=config), row_bytes=ROW_BYTES)
        return volume_name("vllm", identity.layout())

    def changed(whole: Any, path: str) -> Any:
        """Return the same with another value at the end of the path, for one group."""
        if isinstance(whole, tuple):
            return (changed(whole[0], path),)
        name, _, rest = path.partition(".")
        if name not in known_fields(type(whole), {name: None}):
            pytest.skip(f"this release does not tell {name}")
        return dataclasses.replace(whole, **{name: changed(getattr(whole, name), rest) if rest else value})

    config = offloading_spec().config
    assert volume(changed(config, path)) != volume(config)
    assert volume(offloading_spec().config) == volume(config)


def test_with_a_setting_that_is_not_known_the_engine_serves_without_the_tier(lines: list[str]) -> None:
    manager = Manager("unix:///nobody.sock", load_deadline=1)
    (line,) = [each for each in lines if "serves without the tier" in each]
    assert "no setting 'load_deadline'; did you mean load_deadline_s" in line
    chunks = keys(3)
    context = manager.begin("r", chunks)
    assert manager.look_up(chunks, context) == ["MISS"] * 3
    for is_load in (False, True):
        assert not manager.move(chunks, context, 0, is_load=is_load).success
    manager.tier.shutdown()
    manager.view.release()


def test_a_tier_lets_go_of_the_managers_memory(tmp_path: Path) -> None:
    with FabricThread(small_plan(tmp_path / "fabric")) as fabric:
        manager = Manager(fabric.addresses[0])
        chunks = stored(manager)
        manager.move(chunks, manager.until_hit(chunks), 32, is_load=True)
        manager.tier.shutdown()
        manager.view.release()  # or BufferError: someone still looks at it
