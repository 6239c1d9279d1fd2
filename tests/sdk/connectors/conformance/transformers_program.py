"""Prefixes of transformers' caches under the conformance kit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from tests.sdk.connectors.transformers.test_prefix_cache import PAGE_TOKENS, tiny
from transformers.cache_utils import DynamicCache

import ostraca
from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.transformers import PrefixCache
from ostraca.connectors.transformers.prefix_cache import states_of


class TransformersProgram:
    """A program with transformers' caches. Without a fabric, it computes and connects again later."""

    def __init__(self, options: EngineOptions) -> None:
        self._model = tiny()
        self._options = options
        self._client: ostraca.Client | None = None
        self._prefixes: PrefixCache | None = None
        self._shape = (2 * 2, 1, 2, PAGE_TOKENS, 128)
        self.page_bytes = self.block_bytes = 4 * int(np.prod(self._shape))

    def _cache(self) -> PrefixCache | None:
        if self._prefixes is None:
            try:
                self._client = self._client or ostraca.connect(
                    self._options.address,
                    settings=ostraca.ClientSettings(
                        arena_bytes=32 << 20, chunk_bytes=4 << 20, transports=("inline",)
                    ),
                    timeout_s=self._options.deadline_s,
                )
                self._prefixes = PrefixCache(
                    self._client,
                    self._model,
                    weights=f"seed-0{self._options.layout}",
                    page_tokens=PAGE_TOKENS,
                    deadline_s=self._options.deadline_s,
                )
            except ostraca.OstracaError:
                return None
        return self._prefixes

    @staticmethod
    def _tokens(prompt: str, count: int) -> list[int]:
        """Return the tokens of pages, and another token."""
        pages = [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]
        return [token for page in pages for token in page[:PAGE_TOKENS]] + [0]

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        cache = self._cache()
        if cache is None:
            return [False] * len(pages)
        states = torch.cat(
            [torch.from_numpy(page.copy()).view(torch.float32).view(self._shape) for page in pages], dim=3
        )
        filled = DynamicCache(config=self._model.config)
        for layer in range(2):
            filled.update(states[2 * layer], states[2 * layer + 1], layer)
        put = cache.store(self._tokens(prompt, len(pages)), filled)
        accepted = [
            state in (ostraca.PutState.STAGED, ostraca.PutState.COMMITTED, ostraca.PutState.EXISTS)
            for state in put.states
        ]
        return [True] * (len(pages) - len(accepted)) + accepted

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        return self.load(prompt, count).are_good

    def load(self, prompt: str, count: int) -> LoadedPages:
        memory = np.zeros((count, self.page_bytes), np.uint8)
        cache = self._cache()
        if cache is None:
            return LoadedPages([False] * count, memory)
        loaded = cache.load(self._tokens(prompt, count))
        found = loaded.get_seq_length() // PAGE_TOKENS
        if found:
            states = torch.stack(list(states_of(loaded)))
            for page in range(found):
                part = states[:, :, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].contiguous()
                memory[page] = part.view(-1).view(torch.uint8).numpy()
        return LoadedPages([number < found for number in range(count)], memory)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


CONNECTOR = Connector("transformers", "ostraca.transformers", TransformersProgram)
