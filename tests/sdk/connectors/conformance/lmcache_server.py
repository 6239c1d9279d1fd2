"""LMCache's L2 adapter under the conformance kit, driven as by LMCache's controllers, without LMCache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from tests.sdk.connectors.conformance.options import deadlines
from tests.sdk.connectors.lmcache import server_steps
from tests.sdk.connectors.lmcache.server_steps import ServerSteps

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.lmcache.objects import L2Object, ObjectName
from ostraca.connectors.lmcache.settings import LmcacheSettings


class LmcacheServer:
    """Server with objects of three blocks, hashed alike in every process, as by LMCache's blake3."""

    page_bytes = server_steps.OBJECT_BYTES
    block_bytes = server_steps.BLOCK_BYTES

    def __init__(self, options: EngineOptions) -> None:
        self._layout = server_steps.LAYOUT._replace(form=options.layout)
        settings = server_steps.settings(options.address, **deadlines(options), connect_retry_s=0.5)
        self._steps = ServerSteps(settings)

    @staticmethod
    def _names(prompt: str, count: int) -> list[ObjectName]:
        (plain,) = server_steps.names(1)
        hashes = [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]
        return [plain._replace(chunk_hash=each) for each in hashes]

    def _objects(self, pages: Pages) -> list[L2Object]:
        return server_steps.objects(pages, self._layout)

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        return self._steps.store(self._names(prompt, len(pages)), self._objects(pages.copy()))

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        return self._steps.look_up(self._names(prompt, count), {0: self._layout})

    def load(self, prompt: str, count: int) -> LoadedPages:
        memory = np.zeros((count, self.page_bytes), np.uint8)
        return LoadedPages(self._steps.load(self._names(prompt, count), self._objects(memory)), memory)

    def close(self) -> None:
        self._steps.tasks.close()


CONNECTOR = Connector("LMCache L2", LmcacheSettings.LOGGER, LmcacheServer)
