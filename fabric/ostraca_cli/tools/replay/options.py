"""Options of ``ostraca replay``, and the resulting plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ostraca_cli.command import JSON, count_argument, group, number_argument, option, seconds_argument
from ostraca_cli.terminal.units import size_argument, size_text
from ostraca_cli.tools.replay.plan import (
    BLOCK_BYTES,
    BLOCKS_PER_SEGMENT,
    NUMBER_MAX,
    POLICIES,
    STRIPE_UNITS,
    ReplayPlan,
    parse_budget,
    parse_capacity,
)
from ostraca_fabric.errors import UsageError, shown

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", int, float)

_CAPACITIES = "1%,3%,10%,30%,100%"
_BLOCKS_PER_SEGMENT_MAX = 255
_STRIPE_UNITS = ",".join(map(str, STRIPE_UNITS))
_ENCLOSURES_MIN, _ENCLOSURES_MAX = 2, 1024
_SEED_MAX = (1 << 32) - 1
_NUMBER_LEAST = 1e-6
_STRIPE_UNIT_MAX = 1 << 20
_BLOCK_BYTES_MAX = 1 << 40
_DRIVE_BYTES_MAX = 1 << 60


def plan_of(options: argparse.Namespace) -> ReplayPlan:
    """Return the plan for the options; raises UsageError."""
    for flag, listed in (("--capacity", options.capacity), ("--policies", options.policies)):
        if not listed:
            raise UsageError(f"{flag} is empty: name at least one value, or leave the option out")
    return ReplayPlan(
        policies=options.policies,
        capacities=options.capacity,
        variants=tuple(options.owner),
        budgets=options.budget,
        block_bytes=options.block_bytes,
        blocks_per_segment=options.segment_blocks,
        drive_bytes=options.drive,
        rated_dwpd=options.dwpd,
        rated_years=options.years,
        burst_s=options.burst,
        enclosures=options.enclosures,
        stripe_units=options.stripe_units,
        seed=options.seed,
    )


def _bounded(
    parse: Callable[[str], _Number], least: float, most: float, write: Callable[[Any], str] = str
) -> Callable[[str], _Number]:
    """Return a parser that refuses values outside *least* to *most*."""

    def parse_bounded(text: str) -> _Number:
        value = parse(text)
        if not least <= value <= most:  # also refuses NaN
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is out of range: take {write(least)} to {write(most)}"
            )
        return value

    return parse_bounded


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number") from error


def _list_of(parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    def parse_all(text: str) -> tuple[_Value, ...]:
        try:
            return tuple(parse(part) for part in text.split(",")) if text else ()
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_all


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise UsageError(f"{shown(text)} is no policy: name any of {', '.join(POLICIES)}")
    return text


_number = _bounded(_float, _NUMBER_LEAST, NUMBER_MAX, "{:g}".format)

OPTIONS = (
    option("trace", nargs="?", type=Path, metavar="TRACE", help="a file of JSON lines"),
    JSON,
    option(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write outcomes.json there, and pictures where matplotlib is installed",
    ),
    group(
        "workload",
        option(
            "--generate",
            nargs="?",
            const="",
            metavar="NAME=VALUE,...",
            help=(
                "generate a workload of chat sessions instead of reading a trace, by any of: sessions, "
                "sessions_per_s, turns, think_s, system_prompts, zipf, system_tokens, message_tokens, "
                "answer_tokens, context_tokens_max, seed (docs/howto/replay.md)"
            ),
        ),
        option("--save", type=Path, metavar="FILE", help="write the generated workload as a trace"),
        option(
            "--speed-up",
            type=_number,
            default=1.0,
            metavar="TIMES",
            help="accelerate the trace by this factor (default: 1)",
        ),
    ),
    group(
        "replayed stores",
        option(
            "--capacity",
            type=_list_of(parse_capacity),
            default=_CAPACITIES,
            metavar="SIZE,...",
            help=f"flash, as sizes or shares of the trace's unique blocks, as in 10%%,2TiB (default: "
            f"{_CAPACITIES.replace('%', '%%')})",
        ),
        option(
            "--policies",
            type=_list_of(_policy),
            default=",".join(POLICIES),
            metavar="NAME,...",
            help=f"any of {', '.join(POLICIES)} (default: all)",
        ),
        option(
            "--block-bytes",
            type=_bounded(size_argument, 1, _BLOCK_BYTES_MAX, size_text),
            default=BLOCK_BYTES,
            metavar="SIZE",
            help=(
                f"KV cache of 512 tokens, a hash id (default: {size_text(BLOCK_BYTES)}, of a 70B model in "
                "BF16)"
            ),
        ),
        option(
            "--segment-blocks",
            type=_bounded(count_argument, 1, _BLOCKS_PER_SEGMENT_MAX),
            default=BLOCKS_PER_SEGMENT,
            metavar="N",
            help=f"hash ids to a segment, evicted together (default: {BLOCKS_PER_SEGMENT})",
        ),
        option(
            "--owner",
            action="append",
            default=[],
            metavar="NAME=VALUE,...",
            help=(
                "also replay Ostraca's store with these settings of a shard owner, as in "
                "free_segments=2; may be repeated (a wrong name is answered with the valid names)"
            ),
        ),
        option(
            "--seed",
            type=_bounded(number_argument, 0, _SEED_MAX),
            default=1,
            metavar="N",
            help="for keys and placement (default: 1)",
        ),
    ),
    group(
        "loss of an enclosure",
        option(
            "--enclosures",
            type=_bounded(count_argument, _ENCLOSURES_MIN, _ENCLOSURES_MAX),
            default=0,
            metavar="N",
            help=(
                "also place the blocks of the largest capacity among N enclosures, and report the loss "
                "of hits by the failure of an enclosure half-way (default: no enclosures)"
            ),
        ),
        option(
            "--stripe-units",
            type=_list_of(_bounded(count_argument, 1, _STRIPE_UNIT_MAX)),
            default=_STRIPE_UNITS,
            metavar="N,...",
            help=(
                "hash ids placed together. A fabric places 32 blocks together: 1 hash id for blocks of "
                f"16 tokens, and 32 for blocks of 512 (default: {_STRIPE_UNITS})"
            ),
        ),
    ),
    group(
        "endurance",
        option(
            "--budget",
            type=_list_of(parse_budget),
            default="",
            metavar="BUDGET,...",
            help=(
                "also replay Ostraca's store with these write budgets: drive writes per day as in 0.5, "
                "or a share of the writes without a budget, as in 50%% (default: none)"
            ),
        ),
        option(
            "--burst",
            type=seconds_argument,
            metavar="S",
            help=(
                "largest saved budget, as its accrual time (default: a tenth of the trace; agents save "
                "up to 6 hours)"
            ),
        ),
        option(
            "--drive",
            type=_bounded(size_argument, 1, _DRIVE_BYTES_MAX, size_text),
            metavar="SIZE",
            help=("size of the flash under wear (default: the capacity)"),
        ),
        option(
            "--dwpd",
            type=_number,
            default=1.0,
            metavar="N",
            help="rated drive writes per day of the flash (default: 1)",
        ),
        option(
            "--years",
            type=_number,
            default=5.0,
            metavar="N",
            help="rated years of the flash (default: 5)",
        ),
    ),
)
"""Options of the command."""
