"""vLLM's tier under the conformance kit, driven as by vLLM's scheduler, without vLLM."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

from tests.sdk.connectors import engine_steps
from tests.sdk.connectors.conformance.options import RowCursor, deadlines
from tests.sdk.connectors.engine_steps import EngineSteps

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.vllm.core.lookup_table import ChunkState
from ostraca.connectors.vllm.settings import LOGGER

ROWS = 256
_seeds = itertools.count()


class VllmEngine:
    """vLLM's tier, with keys of an xxhash algorithm: the keys depend on the engine's seed."""

    page_bytes = block_bytes = engine_steps.ROW_BYTES

    def __init__(self, options: EngineOptions) -> None:
        self._environment = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = options.seed
        self._seed = f"{next(_seeds)}" if options.seed == "random" else options.seed
        identity = replace(engine_steps.IDENTITY, packing={"layout": options.layout})
        settings = engine_steps.settings(options.address, **deadlines(options), connect_retry_s=0.5)
        self._steps = EngineSteps(settings, rows=ROWS, identity=identity)
        self._requests = itertools.count()
        self._rows = RowCursor(ROWS)

    def _begin(self, prompt: str, count: int) -> tuple[str, list[bytes]]:
        request = f"request {next(self._requests)}"
        keys = engine_steps.prompt(count, f"{prompt} {self._seed}", hash_bytes=16)
        self._steps.begin(request, keys)
        if request == "request 0":  # every request of vLLM begins with look-ups
            self._steps.ask(request, keys)
        return request, keys

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        request, keys = self._begin(prompt, len(pages))
        rows = self._rows.take(len(pages))
        self._steps.rows[rows] = pages
        stored = self._steps.store(request, keys, rows.start).succeeded
        self._steps.tier.end_request(request)
        return [key in stored for key in keys]

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        request, keys = self._begin(prompt, count)
        states = self._steps.ask(request, keys)
        self._steps.tier.end_request(request)
        return [state is ChunkState.PRESENT for state in states]

    def load(self, prompt: str, count: int) -> LoadedPages:
        request, keys = self._begin(prompt, count)
        rows = self._rows.take(count)
        loaded = self._steps.load(request, keys, rows.start).succeeded
        self._steps.tier.end_request(request)
        return LoadedPages([key in loaded for key in keys], self._steps.rows[rows])

    def close(self) -> None:
        self._steps.tier.close()
        os.environ.pop("PYTHONHASHSEED")
        if self._environment is not None:
            os.environ["PYTHONHASHSEED"] = self._environment


CONNECTOR = Connector("vLLM tier", LOGGER, VllmEngine)
