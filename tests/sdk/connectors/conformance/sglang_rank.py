"""SGLang's backend under the conformance kit, called as by HiCache's threads, without SGLang."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from tests.sdk.connectors.conformance.options import deadlines
from tests.sdk.connectors.sglang.plain_pools import settings

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.sglang.page_store import PageStore
from ostraca.connectors.sglang.pages import PageForm
from ostraca.connectors.sglang.settings import RankIdentity, SglangSettings


class SglangRank:
    """Rank with pages of two blocks, named by SHA-256, alike in every process, as by SGLang."""

    block_bytes = 64 << 10
    page_bytes = 96 << 10

    def __init__(self, options: EngineOptions) -> None:
        identity = RankIdentity(
            model="test/model", dtype="bfloat16", page_tokens=16, layers=2, packing={"layout": options.layout}
        )
        self._store = PageStore(
            settings(options.address, **deadlines(options), connect_retry_s=0.5),
            identity,
            block_bytes=self.block_bytes,
        )
        self._form = PageForm((self.page_bytes,), self.block_bytes)

    @staticmethod
    def _keys(prompt: str, count: int) -> list[str]:
        return [hashlib.sha256(f"{prompt} {number}".encode()).hexdigest() for number in range(count)]

    def _blocks(self, pages: Pages) -> list[Pages]:
        cut = self.block_bytes
        return [block for page in pages for block in (page[:cut], page[cut:])]

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        return self._store.store(self._form, self._keys(prompt, len(pages)), [], self._blocks(pages))

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        return self._store.look_up(self._form, self._keys(prompt, count), [])

    def load(self, prompt: str, count: int) -> LoadedPages:
        memory = np.zeros((count, self.page_bytes), np.uint8)
        are_good = self._store.load(self._form, self._keys(prompt, count), [], self._blocks(memory))
        return LoadedPages(are_good, memory)

    def close(self) -> None:
        self._store.close()


CONNECTOR = Connector("SGLang HiCache", SglangSettings.LOGGER, SglangRank)
