"""The page on SGLang names the backend's class and settings."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from ostraca.connectors import sglang
from ostraca.connectors.sglang.settings import SglangSettings
from ostraca.settings import MIB

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "engines" / "sglang.md").read_text()


def test_the_configuration_on_the_page_is_one_that_the_backend_takes() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    entry = json.loads(block)
    settings = SglangSettings.of(entry["ostraca"])
    assert settings.agents == ("unix:///run/ostraca/agent.sock",)
    assert settings.prefix_keys is entry["hicache_storage_pass_prefix_keys"]
    assert entry["interface_v1"] == 1
    assert importlib.util.find_spec(entry["module_path"]) is not None
    assert entry["class_name"] in sglang.__all__
    for name in ("lookup_deadline_s", "load_deadline_s", "store_deadline_s"):
        assert f"`{name}` ({getattr(SglangSettings(), name):g})" in PAGE
    assert f"`block_bytes` ({SglangSettings().block_bytes // MIB} MiB)" in PAGE
    assert f'`volume` defaults to `"{SglangSettings().volume}"`' in PAGE
    assert "`kv_cache_dtype` repeats `--kv-cache-dtype`" in PAGE
