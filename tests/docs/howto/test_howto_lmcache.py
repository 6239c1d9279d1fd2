"""The page on LMCache names the plug-ins' classes and settings."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import yaml

from ostraca.connectors import lmcache
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca.settings import MIB

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "engines" / "lmcache.md").read_text()


def test_the_configuration_on_the_page_is_one_that_the_l2_adapter_takes() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    entry = json.loads(block)
    settings = LmcacheSettings.of(entry["adapter_params"])
    assert settings.agents == ("unix:///run/ostraca/agent.sock",)
    assert settings.volume == LmcacheSettings().volume
    assert importlib.util.find_spec(entry["module_path"]) is not None
    assert entry["class_name"] in lmcache.__all__
    assert f"`block_bytes` ({LmcacheSettings().block_bytes // MIB} MiB)" in PAGE


def test_the_file_on_the_page_is_one_that_the_storage_plugin_takes() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config = yaml.safe_load(block)
    (name,) = config["storage_plugins"]
    extra = config["extra_config"]
    assert extra[f"storage_plugin.{name}.module_path"] == lmcache.__name__
    assert extra[f"storage_plugin.{name}.class_name"] in lmcache.__all__
    settings = LmcacheSettings.of_extra_config(extra)
    assert settings == LmcacheSettings(
        agents=("unix:///run/ostraca/agent.sock",), token_file="/etc/ostraca/token"
    )


def test_the_page_has_the_defaults_that_differ_from_the_tiers() -> None:
    plain, text = LmcacheSettings(), " ".join(PAGE.split())
    assert f'`volume` is `"{plain.volume}"`, `lookups_inflight_max` {plain.lookups_inflight_max}.' in text
    assert f"`layouts_max` ({plain.layouts_max})" in text
    assert f"`start_wait_s` ({plain.start_wait_s:g})" in text
