"""Print what a release of vLLM offers to a tier, as JSON. Run with the release on PYTHONPATH."""

from __future__ import annotations

import dataclasses
import inspect
import json

COLUMNS = (
    "placement by prefix",
    "KV hints",
    "back-pressure",
    "KV cache layout in the identity",
)


def main() -> None:
    import vllm
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from ostraca.connectors.vllm.adapter import OstracaTier

    def fields(kind: type) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    offers = (
        "_offload_key_positions" in fields(ReqContext),
        "kv_hints" in fields(ReqContext),
        "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters,
        "kv_cache_layout" in fields(OffloadingConfig),
    )
    print(
        json.dumps(
            {
                "source": vllm.__file__,
                "missing": sorted(OstracaTier.__abstractmethods__),
                "offers": dict(zip(COLUMNS, offers, strict=True)),
            }
        )
    )


if __name__ == "__main__":
    main()
