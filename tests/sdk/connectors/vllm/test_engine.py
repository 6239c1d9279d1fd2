"""Real vLLM engine on a real fabric: equal tokens in every case, and no waiting requests.

``make test-vllm`` creates an environment with vLLM and runs these tests.
"""

from __future__ import annotations

import importlib.util
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.sdk.connectors.vllm.engine_process import (
    CHUNK_TOKENS,
    MIB,
    ROW_BYTES,
    EngineProcess,
    Generated,
)
from tests.sdk.connectors.vllm.tiny_model import HYBRID_MODEL, write_adapter
from tests.support.fabric.fabric_host import FabricProcess, fill_with_noise

import ostraca
from ostraca.connectors.kv_identity.identity import volume_name
from ostraca.settings import ClientSettings
from ostraca_fabric.model.chain import STRIPE_UNIT_BLOCKS
from ostraca_fabric.model.outcome import BlockState

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm makes an environment that has it",
    ),
]

SHAPE = ("--drives", "2", "--capacity", "520MiB", "--dram", "0")
PROMPT_TOKENS = 1088
"""34 chunks: more than one stripe unit."""
PROMPTS_COUNT = 8
CHUNKS = PROMPTS_COUNT * PROMPT_TOKENS // CHUNK_TOKENS
DISTINCT_CHUNKS = 4 * 3 * PROMPT_TOKENS // (4 * CHUNK_TOKENS)
"""Of the first four prompts: the second of a pair shares the first half with the first."""
ROUND_S = 300.0
"""Longest round of all prompts, computed after all deadlines."""
STORM = 12 * PROMPTS_COUNT
"""Limit of requests to the fabric in a round; a normal round needs about three for each prompt."""


STEP_S = 0.5
"""Longest call of the scheduler on a busy machine, less than any deadline."""


def prompts() -> list[list[int]]:
    """Return prompts in pairs with a common first half."""
    dice = random.Random(0)
    found: list[list[int]] = []
    for _ in range(PROMPTS_COUNT // 2):
        shared = [dice.randrange(3, 1000) for _ in range(PROMPT_TOKENS // 2)]
        found.extend(shared + [dice.randrange(3, 1000) for _ in range(PROMPT_TOKENS // 2)] for _ in range(2))
    return found


PROMPTS = prompts()


def tier(address: str, **settings: Any) -> dict[str, Any]:
    plain = {
        "type": "OstracaTier",
        "module_path": "ostraca.connectors.vllm",
        "agents": address,
        "arena_bytes": 32 * MIB,
        "transports": ["inline"],
        # Long, so that on a busy machine nothing is late but what a test makes late.
        "lookup_deadline_s": 10.0,
        "load_deadline_s": 10.0,
        "store_deadline_s": 20.0,
        "backoff_s": 0.2,
        "backoff_max_s": 0.5,
        "connect_retry_s": 0.1,
    }
    return plain | settings


def watched(address: str, notes: Path, **settings: Any) -> dict[str, Any]:
    names = {
        "type": "WatchedTier",
        "module_path": "tests.sdk.connectors.vllm.watched_tier",
        "notes": str(notes),
    }
    return tier(address, **names, **settings)


def noted(notes: Path) -> Iterator[tuple[ostraca.Layout, list[bytes]]]:
    """Of each request, the layout and its chunks' hashes in order."""
    with notes.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Generate tokens by an engine without any offloading."""
    with EngineProcess(tmp_path_factory.mktemp("plain"), "plain", None) as engine:
        made = engine.generate(PROMPTS, within_s=ROUND_S).tokens
    assert len({tuple(each) for each in made}) == PROMPTS_COUNT, "prompts that can be told apart"
    return made


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricProcess]:
    with FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", "inline") as started:
        yield started


def requests_of(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("requests{"))


def test_an_engine_with_another_hash_seed_loads_nothing_and_its_log_says_why(
    host: FabricProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_told() -> bool:
        return "another engine has begun volume" in engine.log.read_text(errors="replace")

    for number, seed in enumerate((None, "0", "0")):
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)  # as dynamo.vllm does
        else:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        with EngineProcess(tmp_path, f"engine {number}", tier(host.address)) as engine:
            (cached,) = engine.generate(PROMPTS[:1], within_s=ROUND_S, is_settled=True).cached
            assert bool(cached) == (number == 2)
            until_s = time.monotonic() + 10.0
            while seed and not is_told() and time.monotonic() < until_s:
                time.sleep(0.1)
            assert is_told() == bool(seed)


def test_tokens_are_the_same_with_a_fabric_and_without(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "engine", tier(host.address)) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        again = engine.generate(PROMPTS, within_s=ROUND_S)
        assert again.tokens == expected
        together = engine.generate(PROMPTS, within_s=ROUND_S, together=True)
        assert together.tokens == expected
        metrics = engine.metrics()
        assert sum(again.cached) > PROMPTS_COUNT // 2 * PROMPT_TOKENS, metrics
        assert metrics["load_chunks{hit}"] > CHUNKS // 2
        assert metrics["load_bytes"] == metrics["load_chunks{hit}"] * ROW_BYTES
        assert metrics["store_chunks{staged}"] > 0
        assert requests_of(metrics) < 3 * STORM


def test_chunks_in_each_others_place_would_show_in_the_tokens(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    lying = tier(host.address, type="LyingTier", module_path="tests.sdk.connectors.vllm.lying_tier")
    with EngineProcess(tmp_path, "engine", lying) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        until_usable(engine)
        made = engine.generate(PROMPTS, within_s=ROUND_S)
        assert engine.metrics()["load_chunks{hit}"] > 0
        wrong = [each for each, right in zip(made.tokens, expected, strict=True) if each != right]
        assert len(wrong) > PROMPTS_COUNT // 2


def test_a_restarted_engine_loads_what_the_one_before_it_stored(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "first", tier(host.address)) as first:
        assert first.generate(PROMPTS, within_s=ROUND_S).tokens == expected
    with EngineProcess(tmp_path, "second", tier(host.address)) as second:
        until_usable(second)
        made = second.generate(PROMPTS, within_s=ROUND_S)
        assert made.tokens == expected
        assert sum(made.cached) > PROMPTS_COUNT // 2 * PROMPT_TOKENS
        metrics = second.metrics()
        assert metrics["load_chunks{hit}"] > CHUNKS // 2, metrics


def test_an_engine_loads_what_another_one_stores_meanwhile(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with (
        EngineProcess(tmp_path, "one", tier(host.address)) as one,
        EngineProcess(tmp_path, "other", tier(host.address)) as other,
    ):
        until_usable(other)
        cached = 0
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert one.generate([prompt], within_s=ROUND_S).tokens == [tokens]
            one.generate([PROMPTS[0][:100]], within_s=ROUND_S)
            made = other.generate([prompt], within_s=ROUND_S)
            assert made.tokens == [tokens]
            cached += sum(made.cached)
        assert cached > PROMPTS_COUNT // 2 * PROMPT_TOKENS


def test_engines_with_other_weights_or_other_pages_find_nothing(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "first", tier(host.address)) as first:
        assert first.generate(PROMPTS, within_s=ROUND_S).tokens == expected
    for name, revision, chunk_tokens in (("weights", "2", CHUNK_TOKENS), ("pages", "", 2 * CHUNK_TOKENS)):
        other = tier(host.address, revision=revision)
        with EngineProcess(tmp_path, name, other, block_size=chunk_tokens) as second:
            until_usable(second)
            assert second.generate(PROMPTS[:4], within_s=ROUND_S).tokens == expected[:4]
            metrics = second.metrics()
            assert metrics["lookup_chunks{not_found}"] > 0
            assert "load_chunks{hit}" not in metrics


def test_what_one_cache_salt_or_lora_adapter_has_stored_another_does_not_find(
    host: FabricProcess, tmp_path: Path
) -> None:
    here, there = write_adapter(tmp_path / "here", 1), write_adapter(tmp_path / "there", 2)

    def ask(engine: EngineProcess, adapter: Path, salt: str) -> Generated:
        return engine.generate(PROMPTS[:4], within_s=ROUND_S, is_settled=True, adapter=adapter, salt=salt)

    with EngineProcess(tmp_path, "first", tier(host.address), enable_lora=True) as first:
        until_usable(first)
        before = first.metrics()
        stored = ask(first, here, "red").tokens
        metrics = first.metrics()
        assert metrics["offered_chunks"] - before["offered_chunks"] == DISTINCT_CHUNKS, metrics
        assert not dropped(metrics) - dropped(before), metrics
    with EngineProcess(tmp_path, "second", tier(host.address), enable_lora=True) as second:
        until_usable(second)
        before = second.metrics()
        other = ask(second, there, "red").tokens
        assert other != stored, "an adapter that can be told from the other"
        assert ask(second, here, "blue").tokens == stored
        metrics = second.metrics()
        assert metrics.get("load_chunks{hit}") == before.get("load_chunks{hit}")
        again = ask(second, here, "red")
        assert (again.tokens, again.cached) == (stored, [PROMPT_TOKENS] * 4)
        metrics = second.metrics()
        loaded = metrics["load_chunks{hit}"] - before.get("load_chunks{hit}", 0.0)
        assert loaded == DISTINCT_CHUNKS, metrics


def test_chunks_are_placed_by_the_stripe_units_of_their_prompt(host: FabricProcess, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with EngineProcess(tmp_path, "engine", watched(host.address, notes)) as engine:
        until_usable(engine)
        engine.generate(PROMPTS[:1], within_s=ROUND_S)
        until_usable(engine)
    layout, hashes = max(noted(notes), key=lambda each: len(each[1]))
    assert len(hashes) == CHUNKS // PROMPTS_COUNT > STRIPE_UNIT_BLOCKS
    settings = ClientSettings(arena_bytes=32 * MIB, transports=("inline",))
    with ostraca.connect(host.address, settings=settings) as client:
        volume = client.volume(volume_name("vllm", layout), layout, block_bytes=ROW_BYTES)
        found = volume.lookup(volume.chain(hashes), deadline_s=10.0).chains[0].state_codes
        assert set(found) == {BlockState.HIT}
        alone = volume.lookup(volume.chain(hashes, is_chained=False), deadline_s=10.0).chains[0].state_codes
        assert set(alone[::STRIPE_UNIT_BLOCKS]) == {BlockState.HIT}
        assert BlockState.MISS in alone, "looked for by its own hash, a chunk is found by chance alone"


def test_stores_that_vllm_finds_too_slow_are_not_asked_for(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    pressure = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 1e-9,
        "low_water_s": 1e-9,
        "warmup_completions": 1,
        "decay_half_life_s": 3600.0,
    }
    with EngineProcess(tmp_path, "engine", tier(host.address, backpressure=pressure)) as engine:
        until_usable(engine)
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        metrics = engine.metrics()
        assert metrics["backpressure_blocks_dropped"] > CHUNKS // 2
        assert metrics["store_chunks{staged}"] < CHUNKS // 2


def test_each_kv_group_of_a_hybrid_model_is_stored_and_loaded(host: FabricProcess, tmp_path: Path) -> None:
    with EngineProcess(tmp_path, "plain", None, model_config=HYBRID_MODEL) as plain:
        wanted = plain.generate(PROMPTS, within_s=ROUND_S).tokens
    assert len({tuple(each) for each in wanted}) == PROMPTS_COUNT, "prompts that can be told apart"
    with EngineProcess(tmp_path, "first", tier(host.address), model_config=HYBRID_MODEL) as first:
        assert first.generate(PROMPTS, within_s=ROUND_S).tokens == wanted
    with EngineProcess(tmp_path, "second", tier(host.address), model_config=HYBRID_MODEL) as second:
        until_usable(second)
        made = second.generate(PROMPTS, within_s=ROUND_S)
        assert made.tokens == wanted
        assert sum(made.cached) > PROMPTS_COUNT // 2 * PROMPT_TOKENS


def test_a_stopped_agent_costs_time_and_no_token(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    settings = {"lookup_deadline_s": 1.0, "load_deadline_s": 2.0, "store_deadline_s": 2.0}
    with EngineProcess(tmp_path, "engine", watched(host.address, tmp_path / "notes", **settings)) as engine:
        engine.generate(PROMPTS, within_s=ROUND_S)
        before = requests_of(engine.metrics())
        host.signal(signal.SIGSTOP)
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        metrics = engine.metrics()
        assert requests_of(metrics) - before < STORM
        assert 0 < metrics["slowest_call_s"] < STEP_S
        host.signal(signal.SIGCONT)
        until_loaded(engine, expected)


def test_an_agent_stopped_in_the_midst_of_a_round_costs_no_token(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    settings = {"lookup_deadline_s": 0.3, "load_deadline_s": 1.0, "store_deadline_s": 1.0}
    with EngineProcess(tmp_path, "engine", tier(host.address, **settings)) as engine:
        engine.generate(PROMPTS, within_s=ROUND_S)
        for number, delay_s in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.5)):
            timer = threading.Timer(delay_s, host.signal, [number])
            timer.start()
            assert engine.generate(PROMPTS, within_s=ROUND_S, together=True).tokens == expected
            timer.join()


def test_a_killed_agent_costs_no_token_and_is_used_again_once_restarted(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "engine", tier(host.address)) as engine:
        engine.generate(PROMPTS, within_s=ROUND_S)
        killer = threading.Timer(0.3, host.kill)
        killer.start()
        assert engine.generate(PROMPTS, within_s=ROUND_S, together=True).tokens == expected
        killer.join()
        before = requests_of(engine.metrics())
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        assert requests_of(engine.metrics()) - before < STORM
        host.start()
        until_loaded(engine, expected)


def test_noise_on_flash_is_computed_again_and_reaches_no_token(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "engine", tier(host.address)) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        fill_with_noise(tmp_path / "fabric")
        before = requests_of(engine.metrics())
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        metrics = engine.metrics()
        assert metrics["load_chunks{damaged}"] > 0
        assert requests_of(metrics) - before < STORM


def test_an_engine_that_never_finds_a_fabric_goes_on_without(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "engine", tier(f"unix://{tmp_path}/nobody.sock")) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        metrics = engine.metrics()
        assert requests_of(metrics) == 0
        assert metrics["lookup_chunks{no_fabric}"] > 0
        assert metrics["is_usable"] == 0


def test_a_fabric_that_comes_later_goes_and_comes_back_is_used_whenever_it_is_there(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    host = FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", "inline")
    address = f"unix://{tmp_path}/fabric/agent-0.sock"
    with EngineProcess(tmp_path, "engine", tier(address)) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        with host:
            until_loaded(engine, expected)
            assert host.stop() == 0
            assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
            host.start()
            until_loaded(engine, expected)


def test_a_reset_waits_for_jobs_and_blocks_are_loaded_afterwards(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "engine", tier(host.address)) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        assert engine.reset()
        until_loaded(engine, expected)


def test_after_a_hot_swap_of_weights_no_chunk_is_found(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text("step 1")
    with EngineProcess(tmp_path, "engine", tier(host.address, weights_file=str(manifest))) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        until_loaded(engine, expected)
        manifest.write_text("step 2")
        assert engine.reset()
        until_usable(engine)
        before = engine.metrics()
        assert engine.generate(PROMPTS[:1], within_s=ROUND_S).tokens == expected[:1]
        after = engine.metrics()
        assert after["load_chunks{hit}"] == before["load_chunks{hit}"]
        assert after["lookup_chunks{not_found}"] > before["lookup_chunks{not_found}"]


def test_a_router_hears_of_stored_chunks_with_their_tokens(host: FabricProcess, tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    endpoint = f"ipc://{tmp_path}/events"
    heard: list[dict[str, Any]] = []
    prompt = PROMPTS[0]
    chunks = {tuple(prompt[n : n + CHUNK_TOKENS]) for n in range(0, PROMPT_TOKENS, CHUNK_TOKENS)}
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe(b"")
        router.connect(endpoint)
        settings = tier(host.address, enable_kv_events=True)
        with EngineProcess(tmp_path, "engine", settings, kv_events=endpoint) as engine:
            until_usable(engine)
            engine.generate([prompt], within_s=ROUND_S)
            for _ in range(20):
                until_usable(engine)  # some steps of the engine, in which the stores end
                while router.poll(100):
                    _, _, batch = router.recv_multipart()
                    events = msgspec.msgpack.decode(batch)[1]
                    heard += [event for event in events if event["medium"] == "STORAGE"]
                if {tuple(event["token_ids"]) for event in heard} >= chunks:
                    break
    assert {tuple(event["token_ids"]) for event in heard} >= chunks
    for event in heard:
        assert event["type"] == "BlockStored"
        assert event.keys().isdisjoint({"locality", "ownership"}), "or Dynamo's router drops the event"


def test_blocks_cross_by_nixl_too(tmp_path: Path, expected: list[list[int]]) -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed")
    with (
        FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", "nixl") as host,
        EngineProcess(tmp_path, "engine", tier(host.address, transports=["nixl"])) as engine,
    ):
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        until_loaded(engine, expected)


def dropped(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("dropped_chunks{"))


def until_usable(engine: EngineProcess) -> None:
    """Let the engine compute something else until it has found the fabric."""
    dice = random.Random(1)
    for _ in range(100):
        engine.generate([[dice.randrange(3, 1000) for _ in range(2 * CHUNK_TOKENS)]], within_s=ROUND_S)
        if engine.metrics().get("is_usable"):
            return
    raise AssertionError("the engine does not find the fabric")


def until_loaded(engine: EngineProcess, expected: list[list[int]]) -> None:
    """Go on until a round loads from the fabric, with the right tokens all along."""
    for _ in range(20):
        before = engine.metrics().get("load_chunks{hit}", 0.0)
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        if engine.metrics().get("load_chunks{hit}", 0.0) > before:
            return
    raise AssertionError("the fabric is not used")
