"""LMCache's own engine with the storage plug-in, under the conformance kit."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from lmcache.v1 import token_database
from tests.sdk.connectors.conformance.options import RowCursor, deadlines
from tests.sdk.connectors.lmcache import server_steps
from tests.sdk.connectors.lmcache.cpu_engine import PAGES, CpuEngine

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.lmcache.settings import LmcacheSettings

LAYERS = {"": 4, "other": 8, "earlier": 2}
"""Layers of each layout; equal sizes."""

_random_seeds = itertools.count(1000)


class LmcacheEngine:
    """Engine whose chunk hashes begin with a number made from the seed, as vLLM does."""

    page_bytes = server_steps.OBJECT_BYTES
    block_bytes = server_steps.BLOCK_BYTES

    def __init__(self, options: EngineOptions) -> None:
        self._hash_root = next(_random_seeds) if options.seed == "random" else int(options.seed)
        settings: dict[str, Any] = deadlines(options) | {"connect_retry_s": 0.5}
        self._engine = CpuEngine(
            options.address, layers=LAYERS[options.layout], hash_root=self._hash_root, **settings
        )
        self._rows = RowCursor(PAGES)

    def _begin(self, prompt: str, count: int) -> list[int]:
        """Return the tokens of a prompt, and take pages for the engine's KV."""
        token_database.NONE_HASH = self._hash_root
        self._engine.pages.first = self._rows.take(count).start
        digest = hashlib.sha256(prompt.encode()).digest()[: server_steps.CHUNK_TOKENS]
        return [number << 8 | byte for number in range(count) for byte in digest]

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        """Store, and look up: LMCache learns nothing of a store's success."""
        tokens = self._begin(prompt, len(pages))
        self._memory(len(pages))[:] = pages
        self._engine.store(tokens)
        return self._found(tokens)

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        return self._found(self._begin(prompt, count))

    def load(self, prompt: str, count: int) -> LoadedPages:
        tokens = self._begin(prompt, count)
        memory = self._memory(count)
        memory[:] = 0
        return LoadedPages(self._engine.load(tokens), memory)

    def close(self) -> None:
        self._engine.close()

    def _found(self, tokens: list[int]) -> list[bool]:
        count, found = (
            number // server_steps.CHUNK_TOKENS for number in (len(tokens), self._engine.look_up(tokens))
        )
        return [page < found for page in range(count)]

    def _memory(self, count: int) -> Pages:
        first = self._engine.pages.first
        memory: Pages = self._engine.pages.memory[first : first + count]
        return memory


CONNECTOR = Connector("LMCache 0.5.6 engine", LmcacheSettings.LOGGER, LmcacheEngine)
