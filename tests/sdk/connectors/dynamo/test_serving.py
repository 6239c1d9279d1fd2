"""Dynamo's KV router over two vLLM workers on a CPU, which share one fabric.

``make test-dynamo`` creates an environment with Dynamo and runs these tests.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from tests.sdk.connectors.dynamo.serving import (
    CHUNK_TOKENS,
    MEMORY_CHUNKS,
    DynamoFrontend,
    DynamoWorker,
    RouterDecision,
)
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    MIB,
    SMALL,
    FabricProcess,
    content,
    fill_with_noise,
    hashes,
    volume_of,
)

import ostraca

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None,
        reason="Dynamo is not installed here; make test-dynamo makes an environment that has it",
    ),
]

CHUNKS = 20
PROMPT_TOKENS = CHUNKS * CHUNK_TOKENS + 10
SHORT_TOKENS = PROMPT_TOKENS // 2
"""Tokens of a prompt that is too short to be stored."""
CAPACITY_BYTES = 520 * MIB
DISK_CREDIT = 0.25
"""Credit of the router for a block on a worker's disk, where a block in device memory has 1."""
PATIENCE_S = 60.0
"""Longest way of an event to the router on a busy machine."""


def made_up(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 1000) for _ in range(tokens)]


PROMPTS = [made_up(seed) for seed in range(6)]
"""Prompts that do not fit a worker's memory together."""


@dataclass(frozen=True, slots=True)
class RoutedPair:
    """Two workers behind a router, above one fabric."""

    host: FabricProcess
    frontend: DynamoFrontend
    first: DynamoWorker
    second: DynamoWorker

    @property
    def workers(self) -> tuple[DynamoWorker, DynamoWorker]:
        return self.first, self.second

    def forget(self, worker: DynamoWorker) -> None:
        """Evict everything from a worker's memory, by prompts that are not stored."""
        for _ in range(3 * MEMORY_CHUNKS * CHUNK_TOKENS // SHORT_TOKENS):
            self.frontend.ask(made_up(random.randrange(1 << 32), SHORT_TOKENS), worker=worker)

    def store(self, prompt: list[int], worker: DynamoWorker) -> None:
        """Let a worker compute a prompt and store its chunks."""
        before = worker.count("store_chunks", "staged")
        self.frontend.ask(prompt, worker=worker)
        until(lambda: worker.count("store_chunks", "staged") == before + CHUNKS)

    def decided(self, prompt: list[int], is_expected: Callable[[RouterDecision], bool]) -> RouterDecision:
        """Return the router's choice, once as expected: events take their time."""
        until(lambda: is_expected(self.frontend.decide(prompt)))
        return self.frontend.decide(prompt)


def tier(address: str) -> dict[str, Any]:
    return {
        "type": "ostraca",
        "agents": address,
        "enable_kv_events": True,
        "break_even_tokens": PROMPT_TOKENS - CHUNK_TOKENS,
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


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Generate tokens by a worker without any offloading."""
    folder = tmp_path_factory.mktemp("plain")
    with DynamoFrontend(folder) as frontend, DynamoWorker(folder, "worker", None) as worker:
        worker.until_serving()
        frontend.until_routing_to(worker)
        made = [frontend.ask(prompt).tokens for prompt in PROMPTS]
    assert len({tuple(each) for each in made}) == len(PROMPTS), "prompts that can be told apart"
    return made


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedPair]:
    folder = tmp_path_factory.mktemp("served")
    shape = ("--drives", "2", "--capacity", f"{CAPACITY_BYTES // MIB}MiB", "--dram", "0")
    with ExitStack() as stack:
        host = stack.enter_context(FabricProcess(folder / "fabric", *shape, "--transport", "inline"))
        pair = RoutedPair(
            host,
            DynamoFrontend(folder),
            DynamoWorker(folder, "first", tier(host.address)),
            DynamoWorker(folder, "second", tier(host.address)),
        )
        for process in (pair.frontend, *pair.workers):
            stack.callback(process.kill)
        yield pair


@pytest.fixture
def pair(deployed: RoutedPair) -> RoutedPair:
    """Return the deployment with every process running."""
    for process in (deployed.frontend, *deployed.workers):
        if not process.is_running:
            process.start()
    for worker in deployed.workers:
        worker.until_serving()
    deployed.frontend.until_routing_to(*deployed.workers)
    return deployed


@pytest.fixture
def renewed(deployed: RoutedPair) -> Iterator[None]:
    """Give the tests afterwards an empty fabric."""
    yield
    deployed.host.kill()
    shutil.rmtree(deployed.host.directory)
    deployed.host.start()


def test_tokens_are_the_same_with_the_tier_and_without(pair: RoutedPair, expected: list[list[int]]) -> None:
    before = pair.second.count("load_chunks", "hit")
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        pair.store(prompt, pair.first)
        answer = pair.frontend.ask(prompt, worker=pair.second)
        assert (answer.tokens, answer.cached) == (tokens, CHUNKS * CHUNK_TOKENS)
    assert pair.second.count("load_chunks", "hit") == before + len(PROMPTS) * CHUNKS
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert [answer.tokens for answer in pool.map(pair.frontend.ask, PROMPTS)] == expected


@pytest.mark.parametrize("lose", ["evict", "damage"])
@pytest.mark.usefixtures("renewed")
def test_the_router_follows_announced_chunks_until_the_fabric_loses_them(pair: RoutedPair, lose: str) -> None:
    prompt = made_up(100 + len(lose))
    first, second = pair.first.identity, pair.second.identity
    costs = pair.frontend.decide(prompt).costs
    assert costs[first] == costs[second], "no worker has the prompt"

    pair.frontend.ask(prompt[: 3 * CHUNK_TOKENS + 1], worker=pair.second)
    before = pair.decided(prompt, lambda decision: decision.costs[second] < costs[second])
    assert before.worker == second, "three blocks in device memory"
    assert before.costs == {first: costs[first], second: costs[second] - 3}

    pair.store(prompt, pair.first)
    pair.forget(pair.first)
    after = pair.decided(prompt, lambda decision: decision.disk_blocks == CHUNKS)
    assert after.worker == first, "twenty blocks on flash"
    assert after.logit == costs[first] - CHUNKS * DISK_CREDIT
    assert after.costs == {first: after.logit, second: before.logit}

    if lose == "evict":
        overwrite_all(pair.host)
    else:
        fill_with_noise(pair.host.directory)
    pair.frontend.ask(prompt[:SHORT_TOKENS], worker=pair.first)  # too short to be stored and announced again
    pair.forget(pair.first)
    assert pair.decided(prompt, lambda decision: decision.worker == second).costs == before.costs


def test_a_killed_agent_costs_computed_prompts_and_no_answer(
    pair: RoutedPair, expected: list[list[int]]
) -> None:
    for prompt in PROMPTS:
        pair.frontend.ask(prompt, worker=pair.first)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(pair.frontend.ask, prompt, worker=worker)
            for _ in range(4)
            for prompt in PROMPTS
            for worker in pair.workers
        ]
        until(asked[len(PROMPTS)].done)
        pair.host.kill()
        answers = [each.result() for each in asked]
    wanted = [tokens for _ in range(4) for tokens in expected for _ in pair.workers]
    assert [answer.tokens for answer in answers] == wanted
    assert min(answer.cached for answer in answers[len(PROMPTS) :]) == 0, "prompts computed again"
    pair.host.start()
    for worker in pair.workers:
        before = worker.count("load_chunks", "hit")

        def is_loading(worker: DynamoWorker = worker, before: float = before) -> bool:
            made = [pair.frontend.ask(prompt, worker=worker).tokens for prompt in PROMPTS]
            assert made == expected
            return worker.count("load_chunks", "hit") > before

        until(is_loading)


def test_a_worker_loads_a_prompt_that_a_killed_worker_computed(
    pair: RoutedPair,
) -> None:
    prompt = made_up(200)
    pair.store(prompt, pair.first)
    computed = pair.frontend.ask(prompt, worker=pair.first)
    pair.first.kill()
    pair.frontend.until_routing_to(pair.second)
    before = pair.second.count("load_chunks", "hit")
    answer = pair.frontend.ask(prompt)
    assert answer.worker == pair.second.identity
    assert (answer.tokens, answer.cached) == (computed.tokens, CHUNKS * CHUNK_TOKENS)
    until(lambda: pair.second.count("load_chunks", "hit") == before + CHUNKS)


def overwrite_all(host: FabricProcess) -> None:
    """Put other blocks, twice as many as the flash holds."""
    batch = 64
    with ostraca.connect(host.address, settings=SMALL) as client:
        volume = volume_of(client)
        source = content(batch)
        for seed in range(2 * CAPACITY_BYTES // (batch * BLOCK_BYTES)):
            put = volume.put(volume.chain(hashes(batch, seed)), source=source, deadline_s=20.0)
            assert put.accepted == batch, put


def until(is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < until_s
        time.sleep(0.1)
