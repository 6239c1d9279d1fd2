"""Adapter: the class loaded by vLLM 0.28 to 0.33.

All differences between these versions are in this module, as far as a tier is concerned:

- 0.28: the first with ``module_path``; a job names rows as ``block_ids``
- 0.29: block hashes are alike in every process without PYTHONHASHSEED (0.28 needs it set); the configuration
  names the KV cache layout
- 0.30: rows are ``chunk_ids``; the configuration names KV groups
- 0.31: requests tell the ends of their keys, and carry KV hints; back-pressure detectors; results tell bytes
- 0.32: hits are attributed to a tier by its medium
- 0.33: a tier may be called from another thread, never from two at once
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity
from ostraca.connectors.transfers.counters import METRICS
from ostraca.connectors.transfers.jobs import RowJob, TransferJob
from ostraca.connectors.vllm.core.hints import parse_hints
from ostraca.connectors.vllm.core.lookup_table import ChunkState
from ostraca.connectors.vllm.settings import LOGGER, METRIC_PREFIX
from ostraca.connectors.vllm.shape import hash_seed_problem
from ostraca.connectors.vllm.tier import HASH_BYTES, Tier, read_settings

log = logging.getLogger(LOGGER)

_LOOKUP_RESULTS = {
    ChunkState.PRESENT: LookupResult.HIT,
    ChunkState.MISSING: LookupResult.MISS,
    ChunkState.PENDING: LookupResult.RETRY,
}
_POSITIONS = "_offload_key_positions"
"""Field of a request for keys and their end tokens. vLLM's accessor gives the position of a known key only,
and vLLM never asks for the first key of a stripe unit in GPU memory.
"""

_HAS_POSITIONS = _POSITIONS in {field.name for field in dataclasses.fields(ReqContext)}
_RESULT_FIELDS = {field.name for field in dataclasses.fields(JobResult)}


class OstracaTier(SecondaryTierManager):
    """Secondary tier of vLLM's TieringOffloadingSpec.

    vLLM creates the tier and calls it from the scheduler.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 (vLLM's classes have no types here)
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object = None,
        **config: object,
    ) -> None:
        """Read the tier's configuration, and connect in the background.

        With an invalid entry in the configuration, the engine serves without the tier.
        """
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        settings = read_settings(config, publishes_events=offloading_spec.config.enable_kv_cache_events)
        why = hash_seed_problem(vllm.__version__, HASH_BYTES, os.environ)
        if why:
            log.warning("Ostraca: %s", why)
        self.locality = Locality(settings.locality) if settings and settings.locality else None
        rows = np.asarray(primary_kv_view).view(np.uint8)
        self._tier = Tier(engine_identity(offloading_spec, row_bytes=rows.shape[1]), settings, rows)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:  # noqa: ANN401
        """Begin a request, offloaded chunk by chunk as is vLLM's default."""
        envelope = getattr(req_context, "kv_hints", None)
        hints = parse_hints(envelope.actions) if envelope is not None else None
        self._tier.begin_request(req_context.req_id, _positions(req_context), hints)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401
        """Tell whether a chunk can be loaded; RETRY until known."""
        return _LOOKUP_RESULTS[self._tier.look_up(key, req_context.req_id)]

    def submit_load(self, job_metadata: Any) -> None:  # noqa: ANN401
        """Start to fill rows."""
        self._tier.load(_job(job_metadata))

    def submit_store(self, job_metadata: Any) -> None:  # noqa: ANN401
        """Start to store rows."""
        self._tier.store(_job(job_metadata))

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the finished jobs."""
        return [self._result(finished) for finished in self._tier.take_finished()]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the news for routers, if announced at all.

        Events name no owner, as those of vLLM's own tiers: Dynamo's router drops events with one.
        """
        return [
            OffloadingEvent(
                keys=list(event.keys),
                medium=self.medium,
                removed=event.is_removed,
                locality=self.locality,
            )
            for event in self._tier.take_events()
        ]

    def has_pending_work(self) -> bool:
        """Tell whether the engine must keep stepping for this tier."""
        return self._tier.has_work

    def on_schedule_end(self, context: object) -> None:
        """Send the lookups of this step."""
        del context
        self._tier.end_step()

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401
        """Forget a request."""
        self._tier.end_request(req_context.req_id)

    def drain_jobs(self) -> None:
        """Wait until no job is under way, at most until the deadlines."""
        self._tier.drain()

    def shutdown(self) -> None:
        """End the connection and release vLLM's memory before vLLM unmaps it."""
        self._tier.close()
        self._primary_kv_view = memoryview(b"")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Declare the tier's metrics among vLLM's."""
        del extra_config
        kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
        return {
            METRIC_PREFIX + metric.name: kinds[metric.kind](
                documentation=metric.help, labelnames=(metric.label,) if metric.label else ()
            )
            for metric in METRICS
        }

    def get_stats(self) -> Any:  # noqa: ANN401
        """Return the counts since the last call, in vLLM's form."""
        # Not at the top: vLLM's connector imports its tiers.
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: PLC0415
            OffloadingConnectorStats,
        )

        stats = OffloadingConnectorStats()
        for metric, label, value in self._tier.samples():
            labels = (label,) if metric.label else ()
            if metric.kind == "counter":
                stats.increase_counter(METRIC_PREFIX + metric.name, value, labels)
            else:
                stats.set_gauge(METRIC_PREFIX + metric.name, value, labels)
        return stats

    def _result(self, finished: TransferJob) -> JobResult:
        told: dict[str, Any] = {"transfer_time": finished.seconds}
        if "transfer_bytes" in _RESULT_FIELDS:
            told["transfer_bytes"] = len(finished.succeeded) * self._tier.row_bytes
        if finished.is_load and finished.failed:
            told["successful_keys"] = finished.succeeded
        return JobResult(finished.job_id, not finished.failed, **told)


def engine_identity(offloading_spec: Any, *, row_bytes: int) -> KvIdentity:  # noqa: ANN401
    """Read the identity of the engine's KV from vLLM's description. A row is one chunk of all workers.

    vLLM's block hashes commit to all per-request differences: tokens, name of the LoRA adapter, cache salt,
    images. So the identity's adapter and salt stay empty.
    """
    config = offloading_spec.config
    parallel = config.parallel
    groups = tuple(
        GroupIdentity(
            number=getattr(group, "group_id", index),
            block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
            layers=tuple(group.layer_names),
        )
        for index, group in enumerate(config.groups)
    )
    return KvIdentity(
        model=config.model.name,
        dtype=config.model.dtype,
        groups=groups,
        block_bytes=row_bytes,
        tensor_parallel=parallel.tp_size,
        pipeline_parallel=parallel.pp_size,
        context_parallel=parallel.pcp_size * parallel.dcp_size,
        packing=_packing(config, offloading_spec),
        hash_bytes=HASH_BYTES,
        is_chained=_HAS_POSITIONS,
    )


def _packing(config: Any, offloading_spec: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the facts that decide the placement of bytes in a row.

    The facts include vLLM's release, because no release promises the packing of the next.
    """
    is_single_copy = getattr(offloading_spec, "replicated_layout", False)
    return {
        "engine": "vllm",
        "release": ".".join(vllm.__version__.split(".")[:2]),
        "device": str(current_platform.device_type),
        "layout": str(getattr(config, "kv_cache_layout", None)),
        "order": "canonical" if config.canonical_layout else "direct",
        "copies": "one" if is_single_copy else "each worker's",
    }


def _positions(req_context: Any) -> Mapping[bytes, int] | None:  # noqa: ANN401
    return getattr(req_context, _POSITIONS) if _HAS_POSITIONS else None


def _job(metadata: Any) -> RowJob:  # noqa: ANN401
    rows: Iterable[int] = metadata.chunk_ids if hasattr(metadata, "chunk_ids") else metadata.block_ids
    return RowJob(
        metadata.job_id,
        metadata.req_context.req_id,
        tuple(metadata.keys),
        tuple(int(row) for row in rows),
    )
