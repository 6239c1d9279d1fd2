"""The real vLLM engine on a real fabric: the same tokens whatever happens, and no request left waiting.

``make test-vllm`` runs this; it makes an environment that has vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.fabric_host import FabricProcess, drive_files
from tests.vllm.engine_process import (
    CHUNK_TOKENS,
    HYBRID_MODEL,
    MIB,
    EngineError,
    EngineProcess,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm makes an environment that has it",
    ),
]

SHAPE = ("--drives", "2", "--capacity", "520MiB", "--dram", "0")
PROMPT_TOKENS = 1024
PROMPTS_COUNT = 8
CHUNKS = PROMPTS_COUNT * PROMPT_TOKENS // CHUNK_TOKENS
ROUND_S = 120.0
"""How long a round of all prompts may take, computed and with every deadline run out."""
STORM = 12 * PROMPTS_COUNT
"""More requests to the fabric than this, in one round, would be a storm: a round needs about three for each
prompt."""


def prompts() -> list[list[int]]:
    """Prompts of which pairs share their first half."""
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
        "lookup_deadline_s": 2.0,
        "load_deadline_s": 3.0,
        "store_deadline_s": 5.0,
        "pause_s": 0.2,
        "pause_s_max": 0.5,
        "connect_retry_s": 0.1,
    }
    return plain | settings


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens that an engine without any offloading makes."""
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
        assert sum(again.cached) > PROMPTS_COUNT // 2 * PROMPT_TOKENS
        assert metrics["load_chunks{hit}"] > CHUNKS // 2
        assert metrics["load_bytes"] == metrics["load_chunks{hit}"] * (64 << 10)
        assert metrics["store_chunks{staged}"] > 0
        assert requests_of(metrics) < 3 * STORM


def test_noise_in_place_of_what_was_stored_would_show_in_the_tokens(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    lying = tier(host.address, type="LyingTier", module_path="tests.vllm.lying_tier")
    with EngineProcess(tmp_path, "engine", lying) as engine:
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        until_usable(engine)
        made = engine.generate(PROMPTS, within_s=ROUND_S)
        assert engine.metrics()["load_chunks{hit}"] > 0
        assert made.tokens != expected


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
        assert second.metrics()["load_chunks{hit}"] > CHUNKS // 2


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


def test_an_engine_with_other_weights_finds_nothing(
    host: FabricProcess, tmp_path: Path, expected: list[list[int]]
) -> None:
    with EngineProcess(tmp_path, "first", tier(host.address)) as first:
        assert first.generate(PROMPTS, within_s=ROUND_S).tokens == expected
    with EngineProcess(tmp_path, "second", tier(host.address, revision="retrained")) as second:
        until_usable(second)
        assert second.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        assert "load_chunks{hit}" not in second.metrics()


def test_each_kv_group_of_a_hybrid_model_is_stored_and_loaded(host: FabricProcess, tmp_path: Path) -> None:
    with EngineProcess(tmp_path, "plain", None, model_config=HYBRID_MODEL) as plain:
        wanted = plain.generate(PROMPTS, within_s=ROUND_S).tokens
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
    settings = {"lookup_deadline_s": 0.3, "load_deadline_s": 1.0, "store_deadline_s": 1.0}
    with EngineProcess(tmp_path, "engine", tier(host.address, **settings)) as engine:
        engine.generate(PROMPTS, within_s=ROUND_S)
        before = requests_of(engine.metrics())
        host.signal(signal.SIGSTOP)
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        assert requests_of(engine.metrics()) - before < STORM
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


def test_a_setting_that_is_not_known_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no setting 'load_deadline'; did you mean load_deadline_s"):
        EngineProcess(tmp_path, "engine", tier("unix:///nobody", load_deadline=1)).wait()


def test_blocks_cross_by_nixl_too(tmp_path: Path, expected: list[list[int]]) -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed")
    with (
        FabricProcess(tmp_path / "fabric", *SHAPE, "--transport", "nixl") as host,
        EngineProcess(tmp_path, "engine", tier(host.address, transports=["nixl"])) as engine,
    ):
        assert engine.generate(PROMPTS, within_s=ROUND_S).tokens == expected
        until_loaded(engine, expected)


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


def fill_with_noise(directory: Path) -> None:
    """Overwrite whatever was ever written to the drives, so that reads see it."""
    dice = random.Random(2)
    for path in drive_files(directory):
        with path.open("r+b") as file:
            descriptor, at, end = file.fileno(), 0, path.stat().st_size
            while at < end:
                try:
                    at = os.lseek(descriptor, at, os.SEEK_DATA)
                except OSError:
                    break
                hole = os.lseek(descriptor, at, os.SEEK_HOLE)
                os.pwrite(descriptor, dice.randbytes(min(MIB, hole - at)), at)
                at += min(MIB, hole - at)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
