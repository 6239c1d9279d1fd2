"""Tier with measurements: time in calls of the scheduler, and the engine's record of prompts."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadingGaugeMetadata

from ostraca.connectors.vllm import OstracaTier
from ostraca.connectors.vllm.adapter import engine_identity
from ostraca.connectors.vllm.tier import HASH_BYTES

SLOWEST = "vllm:kv_offload_ostraca_slowest_call_s"
_CALLS = (
    "on_new_request",
    "lookup",
    "submit_load",
    "submit_store",
    "get_finished_jobs",
    "has_pending_work",
    "on_schedule_end",
    "on_request_finished",
    "get_stats",
)
"""Calls of the scheduler at its steps."""


class WatchedTier(OstracaTier):
    """Its setting *notes* is a file for the layout and, of each request, its chunks' hashes in order."""

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, *, notes: str, **config: Any) -> None:
        self.slowest_s = 0.0
        self._notes = Path(notes)
        self._layout = engine_identity(offloading_spec, row_bytes=primary_kv_view.shape[1]).layout()
        super().__init__(offloading_spec, primary_kv_view, **config)

    def on_request_finished(self, req_context: Any) -> None:
        positions = req_context._offload_key_positions
        hashes = [key[:HASH_BYTES] for key in sorted(positions, key=positions.__getitem__)]
        with self._notes.open("ab") as file:
            pickle.dump((self._layout, hashes), file)
        super().on_request_finished(req_context)

    def get_stats(self) -> Any:
        stats = super().get_stats()
        stats.set_gauge(SLOWEST, self.slowest_s, ())
        return stats

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        told = {"documentation": "The slowest call of the scheduler.", "labelnames": ()}
        return super().build_metric_definitions(extra_config) | {SLOWEST: OffloadingGaugeMetadata(**told)}


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(self: WatchedTier, *args: Any) -> Any:
        begun_s = time.monotonic()
        try:
            return call(self, *args)
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    return timed


for _name in _CALLS:
    setattr(WatchedTier, _name, _timed(getattr(WatchedTier, _name)))
