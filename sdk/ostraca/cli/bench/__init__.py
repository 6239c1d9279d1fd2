"""``ostraca bench``: how fast a fabric is on this machine, beside what the machine can do at best.

Every figure is a ratio of two things measured in turns in the same minutes. The scripts under ``benchmarks/``
in the repository measure more, with what lies here.
"""

from __future__ import annotations

import argparse
import contextlib

from ostraca.cli.command import Command, count_argument, seconds_argument
from ostraca.cli.progress import progress
from ostraca.cli.sizes import size_argument, size_text
from ostraca.places import directory_argument
from ostraca_fabric.errors import UsageError
from ostraca_fabric.volume import BLOCK_BYTES_MAX


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help="an agent of a fabric that runs (default: run one meanwhile, in a process of its own)",
    )
    parser.add_argument(
        "--dir",
        type=directory_argument,
        help="a directory on the disk to measure, for the fabric that is run meanwhile (default: temporary)",
    )
    parser.add_argument(
        "--blocks", type=count_argument, default=64, metavar="N", help="blocks in a batch (default: 64)"
    )
    parser.add_argument(
        "--block-bytes",
        type=size_argument,
        default="1MiB",
        metavar="SIZE",
        help="bytes of a block (default: 1MiB)",
    )
    parser.add_argument(
        "--seconds",
        type=seconds_argument,
        default=5.0,
        metavar="S",
        help="how long to measure each thing (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _run(options: argparse.Namespace) -> int:
    if options.address and options.dir:
        raise UsageError("pass an ADDRESS to measure a fabric that runs, or --dir to run one there, not both")
    if not 1 <= options.block_bytes <= BLOCK_BYTES_MAX:
        raise UsageError(f"--block-bytes is {options.block_bytes}: blocks have 1 to {BLOCK_BYTES_MAX} bytes")
    from ostraca.cli.bench import report, suite
    from ostraca.cli.bench.series import Pace

    pace = Pace(options.seconds)
    plan = suite.Plan(options.blocks, options.block_bytes, pace, options.dir)
    cases = suite.cases_of_fabric(plan, options.address) if options.address else suite.cases_of_own(plan)
    with contextlib.closing(cases), progress(is_shown=not options.json) as on_progress:
        findings = list(suite.run(cases, pace, on_progress))
    if options.json:
        print(
            report.as_json(
                findings, blocks=plan.blocks, block_bytes=plan.block_bytes, seconds=options.seconds
            )
        )
        return 0
    from rich.console import Console

    title = f"Batches of {plan.blocks} blocks of {size_text(plan.block_bytes)}, every block verified"
    Console().print(report.as_table(findings, title))
    return 0


COMMAND = Command(
    name="bench",
    summary="measure a fabric beside this machine's own limits",
    description=(
        "Measure gets and puts of batches of blocks, each in turns with what this machine can do at best:\n"
        "raw NIXL (or a plain socket) between two processes, and O_DIRECT reads and writes of a file\n"
        "beside the drives."
    ),
    example=(
        "  $ ostraca bench --dir /mnt/nvme/bench --seconds 2\n"
        "  (a table: what, GB/s, the limit it is beside, its GB/s, the ratio)\n"
    ),
    add_options=_add_options,
    run=_run,
)
