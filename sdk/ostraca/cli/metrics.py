"""``ostraca metrics``: what one agent has counted, as OpenMetrics text."""

from __future__ import annotations

import argparse
import asyncio

from ostraca.cli.asking import TOKEN_VARIABLE, add_token_option, chosen_files, chosen_token
from ostraca.cli.command import Command
from ostraca.cli.status import add_address_options, ask, chosen_address


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_address_options(parser)
    add_token_option(parser)


def _run(options: argparse.Namespace) -> int:
    from ostraca_fabric.metrics import agent_samples
    from ostraca_fabric.openmetrics import render

    status = asyncio.run(ask(chosen_address(options), chosen_token(options), chosen_files(options)))
    print(render(agent_samples(status)), end="")
    return 0


COMMAND = Command(
    name="metrics",
    summary="print what an agent has counted, for Prometheus",
    description=(
        "Ask one agent and print its counters, gauges and latency histograms as OpenMetrics text. Each\n"
        f"agent of a fabric counts for itself. Over TCP and TLS an agent wants a token: give\n"
        f"--tokens, or set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca metrics --dir /tmp/fabric | grep blocks_total\n"
        '  ostraca_agent_blocks_total{operation="get",state="HIT",reason="NONE"} 4096\n'
        '  ostraca_agent_blocks_total{operation="get",state="MISS",reason="NOT_FOUND"} 17\n'
    ),
    add_options=_add_options,
    run=_run,
)
