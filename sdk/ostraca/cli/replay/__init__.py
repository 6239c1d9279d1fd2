"""``ostraca replay``: what a fabric's flash would do for a workload that was recorded, or made up.

The trace goes through the owner's real code (index, space, eviction, admission) on the trace's own time and
without any I/O, and beside it through caches of the literature. Nothing runs and nothing is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca.cli.command import Command
from ostraca.cli.progress import progress
from ostraca.cli.replay.options import add_options, plan_of
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from ostraca.cli.replay.trace import Trace


def _run(options: argparse.Namespace) -> int:
    if (options.trace is None) == (options.generate is None):
        raise UsageError("name a TRACE to replay, or --generate one: exactly one of these")
    if options.save is not None and options.generate is None:
        raise UsageError("--save goes with --generate: a trace that is read lies in its file already")
    from ostraca.cli.replay import report, suite
    from ostraca.cli.replay.loss import losses
    from ostraca.cli.replay.statistics import statistics_of

    plan = plan_of(options)
    with progress(is_shown=not options.json) as on_progress:
        trace = _trace(options, on_progress).faster(options.speed_up)
        statistics = statistics_of(trace)
        outcomes = list(suite.outcomes(trace, plan, on_progress))
        lost = list(losses(trace, plan, on_progress)) if plan.enclosures else []
    found = report.Report(plan, statistics, outcomes, lost)
    if options.json:
        print(found.as_json())
    else:
        found.print()
    if options.out is not None:
        found.write(options.out)
    return 0


def _trace(options: argparse.Namespace, on_progress: Callable[[str, float], None]) -> Trace:
    from ostraca.cli.replay.generate import generate, parse_recipe
    from ostraca.cli.replay.trace import Trace, read_trace, write_trace

    if options.trace is not None:
        return read_trace(options.trace, lambda part: on_progress(f"reading {options.trace.name}", part))
    requests = generate(parse_recipe(options.generate))
    if options.save is not None:
        write_trace(requests, options.save)
    return Trace.of(requests)


COMMAND = Command(
    name="replay",
    summary="tell how much flash and which write budget a workload wants",
    description=(
        "Send a recorded workload through the code that owners run, without any I/O, and tell what would\n"
        "have been found and what would have been written. A trace is JSON lines, one request each, as\n"
        "Mooncake publishes them: timestamp (ms), input_length and output_length (tokens), and hash_ids,\n"
        "one for every 512 tokens of the prompt."
    ),
    example=(
        "  $ ostraca replay conversation_trace.jsonl --capacity 1%,10%,30% --budget 50%,25%\n"
        "  (a table: capacity, policy, hits, blocks written, drive writes per day, years)\n"
    ),
    add_options=add_options,
    run=_run,
)
