"""D4: puts acknowledged when committed, beside the best O_DIRECT write of a file on that disk.

Once a batch at a time, where nothing hides what lies before and behind the drive's own work; once with
several batches under way, as an engine offloads; and so again with the disk held back to what a drive may be
asked for by two cores (ADR 0026), where that can be done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.conditions import batch_text
from benchmarks.figure import Figure, Target
from benchmarks.held_back import why_not, writers_to
from ostraca.cli.bench import suite
from ostraca.cli.bench.series import Case, Finding, Pace, measure
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from benchmarks.conditions import Conditions
    from benchmarks.held_back import Writers
    from ostraca.cli.bench.limits import DirectFile
    from ostraca.cli.bench.suite import Plan
    from ostraca.cli.bench.workload import Workload

AHEAD = 3
_BATCHES = 12
"""Put in one turn with several under way: enough that the first and the last count little."""

_HELD_TO = 2_000_000_000
"""Bytes per second: 1 GB/s for each of the two cores that the figures are taken on."""


def run(conditions: Conditions) -> list[Figure]:
    """Measure puts from arena slots."""
    if refused := why_not():
        print(f"d4: the disk can't be held back to {_HELD_TO / 1e9:g} GB/s here: {refused}")
        return [figure for plan in conditions.plans() for figure in _figures(plan, conditions)]
    with writers_to(conditions.directory) as writers:
        return [figure for plan in conditions.plans() for figure in _figures(plan, conditions, writers)]


def _figures(plan: Plan, conditions: Conditions, writers: Writers | None = None) -> list[Figure]:
    directory = conditions.new_directory()
    with (
        suite.own_workload(
            plan, directory, dram_bytes=0, batches=AHEAD, capacity_bytes=4 * plan.capacity_bytes
        ) as work,
        suite.direct_file(plan, directory) as file,
    ):
        # Once around every shard's ring: the file was written before, so shall the drives have been.
        for _ in range(1 if conditions.is_short else 4 * plan.capacity_bytes // plan.batch_bytes):
            work.stored_chain()
        file.tune_writes()
        single = Case("committed", lambda: work.put_slots(Ack.COMMITTED), "O_DIRECT write", file.write)
        what = f"put {batch_text(plan)} committed, from arena"
        ahead = f"{what}, {AHEAD} batches under way"
        found = {what: measure(single, plan.pace), ahead: _sustained(work, file, plan, conditions)}
        if writers is not None:
            with writers.held_to(_HELD_TO):
                held = _sustained(work, file, plan, conditions)
            found[f"{ahead}, drive of {_HELD_TO / 1e9:g} GB/s"] = held
    return [Figure("D4", text, "GB/s", each, Target(ratio_at_least=0.90)) for text, each in found.items()]


def _sustained(work: Workload, file: DirectFile, plan: Plan, conditions: Conditions) -> Finding:
    batches = AHEAD if conditions.is_short else _BATCHES
    case = Case(
        "committed",
        lambda: work.put_slots_ahead(Ack.COMMITTED, batches=batches, ahead=AHEAD),
        "O_DIRECT write",
        lambda: batches / sum(1 / file.write() for _ in range(batches)),
    )
    pace: Pace = replace(plan.pace, warm_ups=1)
    return measure(case, pace)
