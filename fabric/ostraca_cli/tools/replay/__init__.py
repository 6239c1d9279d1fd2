"""``ostraca replay``: a fabric's flash under a recorded or generated workload.

The trace drives the shard owner's real code (index, space, eviction, admission) in trace time, without I/O,
and caches of the literature for comparison. The replay starts no daemon and stores no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_cli.command import Command
from ostraca_cli.terminal.progress import progress
from ostraca_cli.tools.replay.options import OPTIONS, plan_of
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from ostraca_cli.tools.replay.trace import Trace


def _run(options: argparse.Namespace) -> int:
    if (options.trace is None) == (options.generate is None):
        raise UsageError("give either a TRACE to replay, or --generate")
    if options.save is not None and options.generate is None:
        raise UsageError("--save goes with --generate: a recorded trace is a file already")
    from ostraca_cli.tools.replay import suite
    from ostraca_cli.tools.replay.loss import losses
    from ostraca_cli.tools.replay.reports import report
    from ostraca_cli.tools.replay.reports.statistics import statistics_of

    plan = plan_of(options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)  # fail before a long replay, not after
    with progress(is_shown=not options.json) as on_progress:
        trace = _trace(options, on_progress).accelerate(options.speed_up)
        statistics = statistics_of(trace)
        outcomes = list(suite.outcomes(trace, plan, on_progress))
        lost = list(losses(trace, plan, on_progress)) if plan.enclosures else []
    found = report.ReplayReport(plan, statistics, outcomes, lost)
    if options.json:
        print(found.as_json())
    else:
        found.print()
    if options.out is not None:
        found.write(options.out)
    return 0


def _trace(options: argparse.Namespace, on_progress: Callable[[str, float], None]) -> Trace:
    from ostraca_cli.tools.replay.generate import generate, parse_recipe
    from ostraca_cli.tools.replay.trace import Trace, read_trace, write_trace

    if options.trace is not None:
        return read_trace(options.trace, lambda part: on_progress(f"reading {options.trace.name}", part))
    requests = generate(parse_recipe(options.generate))
    if not requests:
        raise UsageError(
            "no request was generated: let context_tokens_max be larger than system_tokens and messages"
        )
    if options.save is not None:
        write_trace(requests, options.save)
    return Trace.of(requests)


COMMAND = Command(
    name="replay",
    summary="estimate flash and write budget for a workload",
    description=(
        "Send a recorded workload through the code of shard owners, without any I/O, and report hits "
        "and\nwrites. A trace consists of JSON lines with a request each, as published by Mooncake: "
        "timestamp (ms),\ninput_length and output_length (tokens), and hash_ids, a number for every "
        "512 tokens of the prompt."
    ),
    example=(
        "  $ ostraca replay conversation_trace.jsonl --capacity 1%,10%,30% --budget 50%,25%\n"
        "  (a table: capacity, policy, hits, blocks written, drive writes per day, years)\n"
    ),
    options=OPTIONS,
    run=_run,
)
