"""The tier's class under the conformance kit, called with vLLM's own types, as by vLLM's tiering manager."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.sdk.connectors.conformance.options import RowCursor, deadlines
from tests.sdk.connectors.vllm.test_adapter import ROW_BYTES, ROWS, Manager

from ostraca.connectors.conformance import Connector, EngineOptions, LoadedPages, Pages
from ostraca.connectors.vllm.settings import LOGGER


class VllmClasses:
    """Tier with chunks hashed by SHA-256, alike in every process, as is vLLM's default."""

    page_bytes = block_bytes = ROW_BYTES

    def __init__(self, options: EngineOptions) -> None:
        settings: dict[str, Any] = {"connect_retry_s": 0.5, "backoff_s": 0.1, "backoff_max_s": 0.2}
        settings |= deadlines(options)
        self._manager = Manager(options.address, layer=f"layer {options.layout}", **settings)
        self._requests = itertools.count()
        self._rows = RowCursor(ROWS)

    def _begin(self, prompt: str, count: int) -> tuple[Any, list[bytes]]:
        keys = [hashlib.sha256(f"{prompt} {number}".encode()).digest() + bytes(4) for number in range(count)]
        return self._manager.begin(f"request {next(self._requests)}", keys), keys

    def store(self, prompt: str, pages: Pages) -> Sequence[bool]:
        context, keys = self._begin(prompt, len(pages))
        rows = self._rows.take(len(pages))
        self._manager.rows[rows] = pages.view(np.int8)
        result = self._manager.move(keys, context, rows.start, is_load=False)
        self._manager.tier.on_request_finished(context)
        return [result.success] * len(pages)

    def lookup(self, prompt: str, count: int) -> Sequence[bool]:
        context, keys = self._begin(prompt, count)
        found = self._manager.look_up(keys, context)
        self._manager.tier.on_request_finished(context)
        return [each == "HIT" for each in found]

    def load(self, prompt: str, count: int) -> LoadedPages:
        context, keys = self._begin(prompt, count)
        rows = self._rows.take(count)
        result = self._manager.move(keys, context, rows.start, is_load=True)
        self._manager.tier.on_request_finished(context)
        good = keys if result.success else result.successful_keys or ()
        return LoadedPages([key in good for key in keys], self._manager.rows[rows].view(np.uint8))

    def close(self) -> None:
        self._manager.tier.shutdown()
        self._manager.view.release()


CONNECTOR = Connector("vLLM 0.32", LOGGER, VllmClasses)
