"""Dynamo's sample worker, which computes nothing, as a worker of a shared cache.

SAMPLE_WORKER in the environment is a JSON object: the ``folder`` with the model, the ``runtime_data``, and
the ``tokens`` of a prefix in the memory of its device.
"""

from __future__ import annotations

import json
import os
from typing import Any

from dynamo.common.backend.publisher import PushSource
from dynamo.common.backend.run import run
from dynamo.common.backend.sample_engine import SampleLLMEngine

BLOCK_TOKENS = 16
GIVEN = json.loads(os.environ.get("SAMPLE_WORKER", "{}"))


class SharingWorker(SampleLLMEngine):  # type: ignore[misc]  # Dynamo has no types here
    """Worker with a fixed prefix in its memory, and the declaration of a shared cache."""

    async def kv_event_sources(self) -> list[Any]:
        return [PushSource(on_ready=announce, dp_rank=0)]

    async def start(self, worker_id: int) -> Any:
        config = await super().start(worker_id)
        config.runtime_data = GIVEN["runtime_data"]
        return config


def announce(publisher: Any) -> None:
    blocks = len(GIVEN["tokens"]) // BLOCK_TOKENS
    if blocks:
        publisher.publish_stored(
            token_ids=GIVEN["tokens"],
            num_block_tokens=[BLOCK_TOKENS] * blocks,
            block_hashes=list(range(1000, 1000 + blocks)),
        )


if __name__ == "__main__":
    os.chdir(GIVEN["folder"])
    run(SharingWorker)
