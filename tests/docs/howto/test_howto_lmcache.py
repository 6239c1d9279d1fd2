"""The page on LMCache names the plug-in's class and settings."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from ostraca.connectors import lmcache
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.settings import MIB

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "engines" / "lmcache.md").read_text()


def test_the_configuration_on_the_page_is_one_that_the_plugin_takes() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    entry = json.loads(block)
    settings = LmcacheSettings.of(entry["adapter_params"])
    assert settings.agents == ("unix:///run/ostraca/agent.sock",)
    assert settings.volume == LmcacheSettings().volume
    assert importlib.util.find_spec(entry["module_path"]) is not None
    assert entry["class_name"] in lmcache.__all__
    assert f"`block_bytes` ({LmcacheSettings().block_bytes // MIB} MiB)" in PAGE
