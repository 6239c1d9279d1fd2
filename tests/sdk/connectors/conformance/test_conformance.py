"""Conformance of every connector, on a fabric with faults, and the table in the docs."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from ostraca.connectors.conformance import SCENARIOS, markdown_table, run
from ostraca_cli.conformance import FaultyFabric

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "conformance.md"
HERE = "tests.sdk.connectors.conformance"
MODULES = {
    "vLLM tier": ("vllm_engine", "ostraca", ()),
    "vLLM 0.32": ("vllm_classes", "vllm", (pytest.mark.vllm, pytest.mark.filterwarnings("ignore"))),
    "LMCache L2": ("lmcache_server", "ostraca", ()),
    "LMCache 0.5.6": (
        "lmcache_classes",
        "lmcache",
        (pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")),
    ),
    "LMCache 0.5.6 engine": (
        "lmcache_engine",
        "lmcache",
        (pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")),
    ),
    "SGLang HiCache": ("sglang_rank", "ostraca", ()),
    "transformers": ("transformers_program", "transformers", ()),
}
"""Module of each connector, its package, and marks. Engines warn at import, and not about a connector."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (_, _, marks) in MODULES.items()])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_connector_passes(scenario: str, name: str, tmp_path: Path) -> None:
    module, package, _ = MODULES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; make test-lmcache has its own")
    connector = importlib.import_module(f"{HERE}.{module}").CONNECTOR
    assert connector.name == name
    with FaultyFabric(tmp_path / "fabric") as fabric:
        run(scenario, connector, fabric)


def test_the_table_in_the_docs_lists_these_results() -> None:
    table = markdown_table(SCENARIOS, {name: dict.fromkeys(SCENARIOS, "pass") for name in MODULES})
    assert table in PAGE.read_text(), f"write this table into {PAGE}:\n{table}"
