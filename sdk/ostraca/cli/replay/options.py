"""What ``ostraca replay`` takes, and the plan that it makes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostraca.cli.command import count_argument, seconds_argument
from ostraca.cli.replay.plan import (
    BLOCK_BYTES,
    BLOCKS_PER_SEGMENT,
    POLICIES,
    STRIPE_UNITS,
    Plan,
    parse_budget,
    parse_capacity,
)
from ostraca.cli.sizes import size_argument, size_text
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")

_CAPACITIES = "1%,3%,10%,30%,100%"
_BLOCKS_PER_SEGMENT_MAX = 255
_STRIPE_UNITS = ",".join(map(str, STRIPE_UNITS))
_ENCLOSURES_MIN, _ENCLOSURES_MAX = 2, 1024
_SEED_MAX = (1 << 32) - 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Fill the command's parser."""
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a file of JSON lines")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="also write outcomes.json there, and pictures where matplotlib is installed",
    )
    _add_workload(parser.add_argument_group("workload"))
    _add_store(parser.add_argument_group("what it is replayed through"))
    _add_loss(parser.add_argument_group("loss of an enclosure"))
    _add_endurance(parser.add_argument_group("endurance"))


def plan_of(options: argparse.Namespace) -> Plan:
    """Return what the options ask for."""
    return Plan(
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


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generate",
        nargs="?",
        const="",
        metavar="NAME=VALUE,...",
        help="make a workload of chat sessions up instead of reading one, by any of: sessions, "
        "sessions_per_s, turns, think_s, system_prompts, zipf, system_tokens, message_tokens, answer_tokens, "
        "context_tokens_max, seed (docs/howto/replay.md)",
    )
    group.add_argument("--save", type=Path, metavar="FILE", help="write what was generated as a trace")
    group.add_argument(
        "--speed-up",
        type=_number_argument,
        default=1.0,
        metavar="TIMES",
        help="let the trace's time pass so many times as fast (default: 1)",
    )


def _add_store(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--capacity",
        type=_list_of(parse_capacity),
        default=_CAPACITIES,
        metavar="SIZE,...",
        help=f"flash, as sizes or shares of the trace's unique blocks, as in 10%%,2TiB (default: "
        f"{_CAPACITIES.replace('%', '%%')})",
    )
    group.add_argument(
        "--policies",
        type=_list_of(_policy),
        default=",".join(POLICIES),
        metavar="NAME,...",
        help=f"any of {', '.join(POLICIES)} (default: all)",
    )
    group.add_argument(
        "--block-bytes",
        type=size_argument,
        default=BLOCK_BYTES,
        metavar="SIZE",
        help="KV cache of the 512 tokens of one hash id (default: "
        f"{size_text(BLOCK_BYTES)}, of a 70B model in BF16)",
    )
    group.add_argument(
        "--segment-blocks",
        type=_segment_blocks,
        default=BLOCKS_PER_SEGMENT,
        metavar="N",
        help=f"hash ids to a segment, evicted together (default: {BLOCKS_PER_SEGMENT})",
    )
    group.add_argument(
        "--owner",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="also replay ours with these settings of an owner, as in free_segments=2; may be given several "
        "times (a wrong name is answered with those that there are)",
    )
    group.add_argument(
        "--seed", type=_seed, default=1, metavar="N", help="for keys and placement (default: 1)"
    )


def _add_endurance(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--budget",
        type=_list_of(parse_budget),
        default="",
        metavar="BUDGET,...",
        help="also replay ours with these write budgets: drive writes per day as in 0.5, or a share of what "
        "is written without one, as in 50%% (default: none)",
    )
    group.add_argument(
        "--burst",
        type=seconds_argument,
        metavar="S",
        help="budget that can be saved up, as the time it comes in (default: a tenth of the trace; agents "
        "save up 6 hours)",
    )
    group.add_argument(
        "--drive", type=size_argument, metavar="SIZE", help="flash that wears (default: the capacity)"
    )
    group.add_argument(
        "--dwpd",
        type=_number_argument,
        default=1.0,
        metavar="N",
        help="drive writes per day that the flash is rated for (default: 1)",
    )
    group.add_argument(
        "--years", type=_number_argument, default=5.0, metavar="N", help="... for so many years (default: 5)"
    )


def _add_loss(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--enclosures",
        type=_enclosures,
        default=0,
        metavar="N",
        help="also place the blocks of the largest capacity among so many enclosures, and tell what is lost "
        "when one dies in the middle (default: leave that out)",
    )
    group.add_argument(
        "--stripe-units",
        type=_list_of(_stripe_unit),
        default=_STRIPE_UNITS,
        metavar="N,...",
        help="hash ids placed together. A fabric places 32 blocks together, which are 1 hash id where blocks "
        f"have 16 tokens, and 32 where they have 512 (default: {_STRIPE_UNITS})",
    )


def _enclosures(text: str) -> int:
    enclosures = count_argument(text)
    if not _ENCLOSURES_MIN <= enclosures <= _ENCLOSURES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text} can't be replayed: take {_ENCLOSURES_MIN} to {_ENCLOSURES_MAX} enclosures"
        )
    return enclosures


def _stripe_unit(text: str) -> int:
    try:
        return count_argument(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from error


def _list_of(parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    def parse_all(text: str) -> tuple[_Value, ...]:
        try:
            return tuple(parse(part) for part in text.split(",")) if text else ()
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_all


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise UsageError(f"{text!r} is no policy: name any of {', '.join(POLICIES)}")
    return text


def _segment_blocks(text: str) -> int:
    blocks = count_argument(text)
    if blocks > _BLOCKS_PER_SEGMENT_MAX:
        raise argparse.ArgumentTypeError(f"{text} are too many: a segment takes {_BLOCKS_PER_SEGMENT_MAX}")
    return blocks


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= _SEED_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: write a whole number up to {_SEED_MAX}")
    return int(text)


def _number_argument(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above zero")
    return number
