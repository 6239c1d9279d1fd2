"""What is wrong with the processes of a soak: they died, hang, grow, saw wrong bytes, or ended too late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.scenarios.soak.crew import Watched, Worker
from tests.scenarios.soak.traffic import Tally

LATE_S = 0.1
SILENT_S = 30.0
"""A worker that tells nothing for so long hangs: its longest deadline is 2 s, and it is stopped for 3."""

FINISH_S = 30.0


class Watch:
    """Workers under a watch."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def look(self, others: Iterable[Watched] = ()) -> list[str]:
        """See whether everybody lives, speaks and stays small; say what is wrong."""
        wrong = []
        for process in (*others, *self._workers):
            process.growth.look(process.pid)
            death = process.died_of()
            if death is not None:
                wrong.append(death)
            if process.growth.is_too_much:
                grown = f"{process.growth.warm_bytes >> 20} to {process.growth.now_bytes >> 20} MiB"
                wrong.append(f"{process.name} grew from {grown}")
        silent = [worker for worker in self._workers if worker.silent_s() > SILENT_S]
        wrong += [f"{worker.name} hangs:\n{worker.where()}" for worker in silent]
        return wrong + [f"wrong bytes: {words}" for words in self.seen().wrong]

    def finish(self) -> list[str]:
        """Have all workers end in good order; say what is wrong with how they did."""
        ended = [worker.finish(within_s=FINISH_S) for worker in self._workers]
        return [problem for problem in ended if problem is not None]

    def seen(self) -> Tally:
        """Return what all of them have seen."""
        whole = Tally()
        for worker in self._workers:
            for told in worker.told():
                whole.add(told.tally)
        return whole

    def errors(self) -> list[str]:
        """Name what operations raised."""
        errors = self.seen().errors.most_common()
        return [f"an operation raised {error} ({count} times)" for error, count in errors]

    def late_anyhow(self) -> int:
        """Count operations that ended too late, whoever was to blame."""
        return sum(late.took_s - late.deadline_s > LATE_S for late in self.seen().overdue)

    def late(self) -> list[str]:
        """Name operations that ended too late though they could run."""
        found = []
        for worker in self._workers:
            for late in [late for told in worker.told() for late in told.tally.overdue]:
                excused_s = late.stalled_s + worker.kept_waiting_s(late.begun_s, late.took_s)
                over_s = late.took_s - late.deadline_s
                if over_s - excused_s > LATE_S:
                    found.append(
                        f"late: {worker.name}'s {late.operation} of {late.deadline_s} s, begun at "
                        f"{late.begun_s:.1f}, ended {over_s:.3f} s after that ({excused_s:.3f} s excused)"
                    )
        return found
