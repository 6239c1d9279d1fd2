"""``ostraca metrics``: counters of an agent, as OpenMetrics text."""

from __future__ import annotations

import argparse
import asyncio

from ostraca_cli.command import Command
from ostraca_cli.commands.agent_query import (
    TOKEN_VARIABLE,
    TOKENS,
    address_options,
    chosen_files,
    chosen_token,
)
from ostraca_cli.commands.status import ask, chosen_address


def _run(options: argparse.Namespace) -> int:
    from ostraca_fabric.telemetry.metrics import AGENT_METRICS
    from ostraca_fabric.telemetry.openmetrics import render

    status = asyncio.run(ask(chosen_address(options), chosen_token(options), chosen_files(options)))
    print(render(AGENT_METRICS, status), end="")
    return 0


COMMAND = Command(
    name="metrics",
    summary="print metrics of an agent, for Prometheus",
    description=(
        "Print counters, gauges and latency histograms of one agent as OpenMetrics text. Over TCP and TLS\n"
        f"agents need a token: give --tokens, or set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca metrics --dir /tmp/fabric | grep blocks_total\n"
        '  ostraca_agent_blocks_total{operation="get",state="HIT",reason="NONE"} 4096\n'
        '  ostraca_agent_blocks_total{operation="get",state="MISS",reason="NOT_FOUND"} 17\n'
    ),
    options=(*address_options(), TOKENS),
    run=_run,
)
