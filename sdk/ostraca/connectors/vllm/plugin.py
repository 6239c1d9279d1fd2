"""Plug-in of vLLM: makes the tier known as ``"type": "ostraca"``.

vLLM calls every function of the entry point group ``vllm.general_plugins`` in each of its processes, also in
installations without offloading. So the function never raises, and does not load the tier.
"""

from __future__ import annotations

import logging

from ostraca.connectors.vllm.settings import LOGGER

TIER_TYPE = "ostraca"


def register() -> None:
    """Register the tier; without effect if repeated, or on vLLM without tiers."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: PLC0415

        SecondaryTierFactory.register_tier(TIER_TYPE, "ostraca.connectors.vllm.adapter", "OstracaTier")
    except ImportError as error:
        logging.getLogger(LOGGER).debug("Ostraca: this vLLM has no secondary tiers: %s", error)
    except ValueError:
        logging.getLogger(LOGGER).debug("Ostraca: the tier is registered already")
