"""The pages on vLLM say what the tier takes and counts."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from ostraca.connectors.transfers.counters import METRICS
from ostraca.connectors.vllm.plugin import TIER_TYPE
from ostraca.connectors.vllm.settings import METRIC_PREFIX, TierSettings

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "howto" / "engines" / "vllm.md").read_text()
REFERENCE = (DOCS / "reference" / "vllm.md").read_text()


def test_the_configuration_on_the_page_is_one_that_the_tier_takes() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (entry,) = json.loads(block)["kv_connector_extra_config"]["secondary_tiers"]
    assert entry.pop("type") == TIER_TYPE
    assert TierSettings.of(entry).agents == ("unix:///tmp/fabric/agent-0.sock",)


def test_every_setting_is_on_the_page_with_its_default() -> None:
    told = dict(re.findall(r"^\| `([a-z_]+)` \| `([^`]*)` \|", REFERENCE, re.MULTILINE))
    plain = TierSettings()
    defaults = {field.name: getattr(plain, field.name) for field in fields(TierSettings)}
    assert {name: json.loads(value) for name, value in told.items()} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()
    }


def test_every_metric_is_on_the_page() -> None:
    assert re.findall(r"^\| `(vllm:[a-z_]+)` \|", REFERENCE, re.MULTILINE) == [
        METRIC_PREFIX + metric.name for metric in METRICS
    ]
