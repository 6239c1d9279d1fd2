"""Dynamo's indexer follows stores and evictions: its view equals the fabric's.

Indexer, publisher, tracker of offloaded chunks, hashes, tier and fabric are the real ones. Steps in the order
of vLLM's scheduler replace its engine.
"""

from __future__ import annotations

import importlib.util
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sdk.connectors.dynamo.serving import GroupProcess, UnavailableError, fetched
from tests.sdk.connectors.vllm.follower import open_port
from tests.sdk.connectors.vllm.test_adapter import offloading_spec
from tests.support.fabric.fabric_host import MIB, SMALL, FabricProcess

import ostraca
from ostraca.connectors.kv_identity.identity import volume_name

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None,
        reason="Dynamo is not installed here; make test-dynamo makes an environment that has it",
    ),
]

TOKENS = 16
CHUNKS = 50
"""Chunks of a prompt."""
ROW_BYTES = 128 << 10
CAPACITY_BYTES = 520 * MIB
PUTS = 10_000
"""Chunks of 1.2 GiB, more than the flash holds twice."""
SETTLED_S = 1.0
PATIENCE_S = 60.0
MODEL = "m"


class PublishingEngine:
    """Tier with vLLM's tracker and publisher of events, driven step by step."""

    def __init__(self, address: str, instance: int) -> None:
        from vllm.distributed.kv_events import ZmqEventPublisher
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

        init_none_hash(sha256_cbor)
        self.instance = instance
        self._hasher = get_request_block_hasher(TOKENS, sha256_cbor)
        self._tracker = OffloadingEventsTracker(
            OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        )
        ports = open_port(), open_port()
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self._publisher = ZmqEventPublisher(0, f"tcp://*:{ports[0]}", f"tcp://*:{ports[1]}")
        self.published = 0
        self._rows = np.zeros((CHUNKS, ROW_BYTES), np.int8)
        self.tier = _tier(address, self._rows)
        self._under_way: dict[int, Any] = {}
        self.stored: dict[int, list[bytes]] = {}
        """Hashes of each stored prompt, in order, by number of its job."""

    @property
    def is_storing(self) -> bool:
        return bool(self._under_way)

    def store(self, number: int) -> None:
        """Begin to store a prompt."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.request import Request

        name = f"{number}"
        request = Request(name, tokens_of(number), SamplingParams(), None, block_hasher=self._hasher)
        keys = [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]
        context = ReqContext(name)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, (position + 1) * TOKENS)
            self._tracker.record_store(request, _group(), position, key)
        self.tier.on_new_request(context)
        rows = np.arange(CHUNKS, dtype=np.int32)
        self.tier.submit_store(TransferJob(number, keys, rows, is_promotion=False, req_context=context))
        self._under_way[number] = context
        self.stored[number] = [bytes(block_hash) for block_hash in request.block_hashes]

    def step(self) -> None:
        """Do a step of vLLM's scheduler: take results, then publish events."""
        from vllm.distributed.kv_events import KVEventBatch

        for result in self.tier.get_finished_jobs():
            self.tier.on_request_finished(self._under_way.pop(result.job_id))
            if not result.success:  # another engine's store of the same chunks is under way
                self.store(result.job_id)
        self.tier.on_schedule_end(None)
        events = list(self._tracker.take_events(self.tier.take_events()))
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
            self.published += 1

    def close(self) -> None:
        self.tier.shutdown()
        self._publisher.shutdown()


class Indexer(GroupProcess):
    """Dynamo's indexer."""

    def __init__(self, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{(port := open_port())}"
        arguments = ["dynamo.indexer", "--block-size", f"{TOKENS}", "--port", f"{port}"]
        super().__init__(folder, "indexer", arguments, {})

    def follow(self, *engines: PublishingEngine) -> None:
        """Subscribe to engines, once the indexer answers."""
        until_s = time.monotonic() + PATIENCE_S
        for engine in engines:
            asked = {
                "instance_id": engine.instance,
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay,
                "model_name": MODEL,
                "block_size": TOKENS,
            }
            while True:
                try:
                    fetched(f"{self._url}/register", json.dumps(asked))
                    break
                except UnavailableError:
                    assert time.monotonic() < until_s, self.words()
                    time.sleep(0.05)

    def view(self, engine: PublishingEngine) -> set[int]:
        """Return the hashes credited to an engine, as on its disk."""
        (dumped,) = json.loads(fetched(f"{self._url}/dump")).values()
        events = [event for event in dumped["events"] if event["worker_id"] == engine.instance]
        assert {event["storage_tier"].lower() for event in events} <= {"disk"}
        return {
            block["block_hash"] for event in events for block in event["event"]["data"]["stored"]["blocks"]
        }

    def matched(self, engine: PublishingEngine, number: int) -> int:
        """Return the chunks of a prompt credited to an engine, from the first on."""
        asked = json.dumps({"token_ids": tokens_of(number), "model_name": MODEL})
        found = json.loads(fetched(f"{self._url}/query", asked))["instances"]
        return int(found.get(f"{engine.instance}", {}).get("disk", 0)) // TOKENS


def _tier(address: str, rows: np.ndarray[Any, Any]) -> Any:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    entry = {
        "type": "OstracaTier",
        "module_path": "ostraca.connectors.vllm",
        "agents": address,
        "enable_kv_events": True,
        "arena_bytes": 32 * MIB,
        "transports": ["inline"],
        "lookup_deadline_s": 5.0,
        "store_deadline_s": PATIENCE_S,
    }
    spec = offloading_spec(publishes_events=True, row_bytes=ROW_BYTES)
    tier = SecondaryTierFactory.create_secondary_tier(entry, rows.data, spec)
    until_s = time.monotonic() + PATIENCE_S
    while not tier._tier.is_linked:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return tier


def _group() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventGroupSpec
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig

    return GroupOffloadConfig(
        group_idx=0,
        tokens_per_block=TOKENS,
        tokens_per_chunk=TOKENS,
        hashes_per_chunk=1,
        kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
        sliding_window_size_in_chunks=None,
        kv_cache_spec=None,
        manager_cls=None,
    )


def tokens_of(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(1 << 16) for _ in range(CHUNKS * TOKENS)]


def run_steps(*engines: PublishingEngine, for_s: float = 0.0) -> None:
    """Step the engines until nothing is under way, and then as long as each wants, for *for_s* in all."""
    until_s = time.monotonic() + PATIENCE_S
    while any(engine.is_storing for engine in engines):
        assert time.monotonic() < until_s
        for engine in engines:
            engine.step()
        time.sleep(0.001)
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        for engine in engines:
            if engine.tier.has_pending_work():
                engine.step()
        time.sleep(0.001)


def in_fabric(address: str, engine: PublishingEngine) -> dict[int, list[bool]]:
    """Return for each prompt of an engine which of its chunks a new client finds."""
    with ostraca.connect(address, settings=SMALL) as client:
        layout = engine.tier._tier._layout()
        volume = client.volume(volume_name("vllm", layout), layout, block_bytes=ROW_BYTES)
        chains = [volume.chain(hashes) for hashes in engine.stored.values()]
        found = volume.lookup(chains, deadline_s=PATIENCE_S, is_counted=False).chains
        return {
            number: [state.name == "HIT" for state in chain.states]
            for number, chain in zip(engine.stored, found, strict=True)
        }


def check_views(indexer: Indexer, address: str, *engines: PublishingEngine) -> None:
    for engine in engines:
        view = indexer.view(engine)
        found = in_fabric(address, engine)
        wanted = {
            int.from_bytes(block_hash[-8:], "big")
            for number, hashes in engine.stored.items()
            for block_hash, is_there in zip(hashes, found[number], strict=True)
            if is_there
        }
        assert len(wanted) > CHUNKS
        assert (len(view - wanted), len(wanted - view)) == (0, 0)
        for number in (*list(found)[:3], *list(found)[-3:]):
            leading = [*found[number], False].index(False)
            assert indexer.matched(engine, number) == leading


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricProcess]:
    shape = ("--drives", "2", "--capacity", f"{CAPACITY_BYTES // MIB}MiB", "--dram", "0")
    with FabricProcess(tmp_path / "fabric", *shape, "--transport", "inline") as started:
        yield started


def test_the_view_of_the_indexer_equals_the_fabrics_a_second_after_a_load(
    tmp_path: Path, host: FabricProcess
) -> None:
    engines = [PublishingEngine(host.address, instance) for instance in (1, 2)]
    prompts = range(PUTS // CHUNKS)
    with Indexer(tmp_path) as indexer:
        indexer.follow(*engines)
        for number in prompts:
            if number == len(prompts) // 2:  # a restart under load
                indexer.kill()
                indexer.start()
                indexer.follow(*engines)
            its = engines if number % 10 == 0 else engines[number % 2 :][:1]
            for engine in its:  # the second of two finds the chunks there
                engine.store(number)
                run_steps(*engines)
        run_steps(*engines, for_s=SETTLED_S)
        check_views(indexer, host.address, *engines)
        lost = [
            states.count(False) for engine in engines for states in in_fabric(host.address, engine).values()
        ]
        assert sum(lost) > PUTS // 2, "the fabric has evicted"

        indexer.kill()
        indexer.start()
        indexer.follow(*engines)
        for engine in engines:  # the indexer asks for earlier events when it hears of the next
            engine.store(len(prompts) + engine.instance)
        run_steps(*engines)
        run_steps(*engines, for_s=SETTLED_S)
        check_views(indexer, host.address, *engines)
    for engine in engines:
        assert engine.published < 10_000, "the publisher can replay all"
        engine.close()
