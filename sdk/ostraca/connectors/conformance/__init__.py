"""Conformance kit: scenarios that every connector of the fabric passes.

An author implements two small ports for the engine's side, and runs each scenario::

    connector = Connector("my-engine", "my_engine.ostraca", open_engine)
    with FaultyFabric(tmp_path / "fabric") as fabric:
        run(scenario, connector, fabric)

``ostraca_cli.conformance.FaultyFabric`` is a fabric with all faults. A failed scenario raises AssertionError.

- ``ports``: the connector as an engine sees it, and the fabric with faults
- ``bench``: steps of scenarios
- ``scenarios``: the scenarios by name
- ``table``: results in Markdown
"""

from ostraca.connectors.conformance.ports import (
    Connector,
    ConnectorUnderTest,
    EngineOptions,
    FabricUnderTest,
    LoadedPages,
    Pages,
)
from ostraca.connectors.conformance.scenarios import SCENARIOS, run
from ostraca.connectors.conformance.table import markdown_table

__all__ = [
    "SCENARIOS",
    "Connector",
    "ConnectorUnderTest",
    "EngineOptions",
    "FabricUnderTest",
    "LoadedPages",
    "Pages",
    "markdown_table",
    "run",
]
