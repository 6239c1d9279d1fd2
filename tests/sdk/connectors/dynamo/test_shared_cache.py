"""Dynamo's router follows the agents' feed of a shared cache.

The router is the real one; the workers compute nothing. A client of the SDK puts pages under SGLang's names.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sdk.connectors.dynamo.serving import (
    MODEL_NAME,
    START_S,
    DynamoFrontend,
    GroupProcess,
    UnavailableError,
)
from tests.sdk.connectors.vllm.follower import open_port
from tests.sdk.connectors.vllm.tiny_model import write_model, write_tokenizer
from tests.support.fabric.fabric_host import MIB, SMALL, FabricThread, content

import ostraca
from ostraca.volume import Volume
from ostraca_cli.testing import small_plan
from ostraca_dpu_agent.settings import RouterFeedSettings

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("dynamo") is None,
        reason="Dynamo is not installed here; make test-dynamo makes an environment that has it",
    ),
]

PAGE_TOKENS = 16
PAGES = 20
BLOCK_BYTES = 1 * MIB
CREDIT = 0.5
"""Credit of the router for a page of the shared cache, where a block in device memory has 1."""
PATIENCE_S = 30.0
DECLARATION = {
    "backend": "mooncake",
    "tenant_id": "default",
    "page_size": PAGE_TOKENS,
    "tp_size": 1,
    "pp_size": 1,
    "is_mla_model": True,
    "is_eagle": False,
    "tp_lcm_size": None,
    "should_split_heads": False,
    "extra_backend_tag": None,
    "key_prefix": "ostraca",
    "kv_events_endpoint": None,
}
LAYOUT = ostraca.Layout(model="test", dtype="bf16", page_tokens=PAGE_TOKENS)


class SampleWorker(GroupProcess):
    """Worker that computes nothing, with a prefix in its memory."""

    def __init__(self, folder: Path, name: str, tokens: Sequence[int] = ()) -> None:
        folder.mkdir(exist_ok=True)
        write_tokenizer(write_model(folder / MODEL_NAME))
        given = {
            "folder": str(folder),
            "runtime_data": {"sglang_hicache_mooncake": DECLARATION},
            "tokens": list(tokens),
        }
        super().__init__(
            folder,
            name,
            [
                "tests.sdk.connectors.dynamo.sample_worker",
                "--model-name",
                MODEL_NAME,
                "--discovery-backend",
                "file",
            ],
            {"SAMPLE_WORKER": json.dumps(given)},
        )


def page_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Return SGLang's hashes of the pages of a prompt."""
    digest, found = b"", []
    for begin in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = tokens[begin : begin + PAGE_TOKENS]
        digest = hashlib.sha256(digest + b"".join(token.to_bytes(4, "little") for token in page)).digest()
        found.append(digest)
    return found


def made_up(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 1000) for _ in range(PAGES * PAGE_TOKENS)]


def put(volume: Volume, hashes: Sequence[bytes]) -> None:
    source = content(len(hashes), block_bytes=BLOCK_BYTES)
    done = volume.put(volume.chain(hashes), source=source, deadline_s=20.0)
    assert done.accepted == len(hashes), done


@pytest.fixture
def feed() -> RouterFeedSettings:
    return RouterFeedSettings(volume="default/pages", bind=f"tcp://127.0.0.1:{open_port()}", round_s=0.2)


@pytest.fixture
def pool(tmp_path: Path, feed: RouterFeedSettings) -> Iterator[Volume]:
    plan = small_plan(tmp_path / "fabric")
    with (
        FabricThread(replace(plan, settings=replace(plan.settings, router_feed=feed))) as fabric,
        ostraca.connect(fabric.addresses, settings=SMALL) as client,
    ):
        yield client.volume("pages", LAYOUT, block_bytes=BLOCK_BYTES, create=True)


@contextmanager
def routing(folder: Path, *workers: SampleWorker, **frontend: Any) -> Iterator[DynamoFrontend]:
    """Run a frontend, once it knows the workers."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        router = stack.enter_context(DynamoFrontend(folder, **frontend))
        for worker in workers:
            stack.enter_context(worker)
        until(lambda: len(costs(router, made_up(0))) == len(workers), within_s=START_S)
        yield router


def shared(feed: RouterFeedSettings) -> dict[str, Any]:
    return {
        "options": ("--shared-cache-type", "hicache"),
        "environment": {"DYN_MOONCAKE_KV_EVENTS_ENDPOINT": feed.bind},
    }


def costs(router: DynamoFrontend, prompt: list[int]) -> list[float]:
    """Return the workers' costs for a prompt, in order."""
    try:
        return sorted(router.decide(prompt).costs.values())
    except UnavailableError:
        return []


def until(is_so: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    until_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_the_router_credits_pages_of_the_fabric_until_their_eviction(
    tmp_path: Path, feed: RouterFeedSettings, pool: Volume
) -> None:
    prompt = made_up(1)
    hashes = page_hashes(prompt)
    worker = SampleWorker(tmp_path / "served", "worker")
    with routing(tmp_path / "served", worker, **shared(feed)) as router:
        (before,) = costs(router, prompt)
        put(pool, hashes[: PAGES // 2])
        until(lambda: costs(router, prompt) == [before - CREDIT * PAGES // 2])
        put(pool, hashes)
        until(lambda: costs(router, prompt) == [before - CREDIT * PAGES])

        router.kill()
        router.start()
        until(lambda: costs(router, prompt) == [before - CREDIT * PAGES], within_s=START_S)

        for seed in range(100, 100 + 1100 * MIB // (PAGES * BLOCK_BYTES)):
            put(pool, page_hashes(made_up(seed)))
        assert not pool.lookup(pool.chain(hashes), deadline_s=5.0).hits
        until(lambda: costs(router, prompt) == [before])


def test_half_credit_for_device_memory_ranks_workers_as_the_feed_does(
    tmp_path: Path, feed: RouterFeedSettings, pool: Volume
) -> None:
    prompt = made_up(2)
    put(pool, page_hashes(prompt))

    def gap(folder: str, **frontend: Any) -> float:
        """Return the distance of two workers' costs, with 3 and 8 blocks of the prompt in memory."""
        workers = [
            SampleWorker(tmp_path / folder, f"worker-{blocks}", prompt[: blocks * PAGE_TOKENS])
            for blocks in (3, 8)
        ]
        with routing(tmp_path / folder, *workers, **frontend) as router:
            found: list[float] = []

            def is_settled() -> bool:
                found[:] = [*found[-2:], *[max(each) - min(each) for each in [costs(router, prompt)] if each]]
                return len(found) == 3 and len(set(found)) == 1 and found[0] > 0

            until(is_settled, within_s=START_S)
            return found[0]

    assert gap("plain") == 5.0
    with_feed = gap("fed", **shared(feed))
    assert with_feed == gap("halved", options=("--router-kv-overlap-score-credit", "0.5")) == 2.5
