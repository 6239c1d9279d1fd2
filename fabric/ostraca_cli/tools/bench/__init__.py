"""``ostraca bench``: speed of a fabric on this machine, against the machine's limits.

Each figure is a ratio of two values measured in alternation within the same minutes. The scripts in
``benchmarks/`` of the repository measure more, with the same modules.
"""

from __future__ import annotations

import argparse
import contextlib

from ostraca_cli.command import Command, count_argument, option, seconds_argument
from ostraca_cli.terminal.progress import progress
from ostraca_cli.terminal.units import size_argument, size_text
from ostraca_fabric.errors import UsageError
from ostraca_fabric.sockets.default_paths import directory_argument


def _run(options: argparse.Namespace) -> int:
    if options.address and options.dir:
        raise UsageError(
            "ADDRESS and --dir exclude each other: pass ADDRESS to measure a running "
            "fabric, or --dir to run a fabric there"
        )
    from ostraca_fabric.model.volume import BLOCK_BYTES_MAX  # needs NumPy

    if not 1 <= options.block_bytes <= BLOCK_BYTES_MAX:
        raise UsageError(f"--block-bytes is {options.block_bytes}: blocks have 1 to {BLOCK_BYTES_MAX} bytes")
    from ostraca_cli.tools.bench import series, suite

    pace = series.Pacing(options.seconds)
    plan = suite.BenchPlan(options.blocks, options.block_bytes, pace, options.dir)
    cases = suite.cases_of_fabric(plan, options.address) if options.address else suite.cases_of_own(plan)
    with contextlib.closing(cases), progress(is_shown=not options.json) as on_progress:
        findings = list(suite.run(cases, pace, on_progress))
    if options.json:
        print(
            series.as_json(
                findings, blocks=plan.blocks, block_bytes=plan.block_bytes, seconds=options.seconds
            )
        )
        return 0
    from rich.console import Console

    title = f"Batches of {plan.blocks} blocks of {size_text(plan.block_bytes)}, every block verified"
    Console().print(series.as_table(findings, title))
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
        "  $ ostraca bench --dir /mnt/nvme/bench --seconds 2\n  (a table: operation, GB/s, limit of "
        "the machine, its GB/s, ratio)\n"
    ),
    options=(
        option(
            "address",
            nargs="?",
            metavar="ADDRESS",
            help=(
                "address of an agent of a running fabric (default: run a temporary fabric, in another "
                "process)"
            ),
        ),
        option(
            "--dir",
            type=directory_argument,
            help="directory of the temporary fabric, on the disk to measure (default: temporary)",
        ),
        option(
            "--blocks", type=count_argument, default=64, metavar="N", help="blocks in a batch (default: 64)"
        ),
        option(
            "--block-bytes",
            type=size_argument,
            default="1MiB",
            metavar="SIZE",
            help="bytes of a block (default: 1MiB)",
        ),
        option(
            "--seconds",
            type=seconds_argument,
            default=5.0,
            metavar="S",
            help="duration of each measurement (default: 5)",
        ),
        option("--json", action="store_true", help="print the figures as JSON"),
    ),
    run=_run,
)
