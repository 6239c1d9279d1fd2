"""Jobs of the engine, and their requests to the fabric.

A job moves several chunks for one request of the engine. The job is over when all its pieces are, and then
reports the successful chunks. The engine's rows stay pinned until this report.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowJob:
    """Chunks to move between rows and the fabric, for one request of the engine."""

    job_id: int
    request: str
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]
    """The row of each key."""


@dataclass(slots=True)
class TransferJob:
    """Job of the engine, with its results so far."""

    job_id: int
    request: str
    is_load: bool
    began_s: float
    pieces: int = 1
    """Pieces under way, and one more until the job is sealed."""

    succeeded: tuple[bytes, ...] = ()
    failed: tuple[bytes, ...] = ()
    seconds: float = 0.0
    """Duration, once the job is over."""


class Transfers:
    """Jobs under way. *ticket* is any hashable name of a request to the fabric."""

    def __init__(self) -> None:
        self._jobs: dict[int, TransferJob] = {}
        self._pieces: dict[Hashable, tuple[TransferJob, tuple[bytes, ...]]] = {}
        self.loading = 0
        """Chunks of loads under way."""
        self.storing = 0
        """Chunks of stores under way."""

    def __len__(self) -> int:
        """Return the number of jobs not over."""
        return len(self._jobs)

    def begin(self, job_id: int, *, request: str, is_load: bool, now_s: float) -> None:
        """Begin a job.

        Next, call ``add`` or ``refuse`` for all of its chunks, then ``seal`` once.
        """
        self._jobs[job_id] = TransferJob(job_id, request, is_load, now_s)

    def add(self, job_id: int, ticket: Hashable, keys: Sequence[bytes]) -> None:
        """Note chunks under way; ``end`` must follow for the ticket."""
        job = self._jobs[job_id]
        job.pieces += 1
        self._pieces[ticket] = job, tuple(keys)
        self._count(job, len(keys))

    def refuse(self, job_id: int, keys: Sequence[bytes]) -> None:
        """Note chunks failed without an attempt."""
        self._jobs[job_id].failed += tuple(keys)

    def seal(self, job_id: int, now_s: float) -> TransferJob | None:
        """Note a job as complete; return the job if no piece is under way."""
        return self._end_piece(self._jobs[job_id], now_s)

    def end(self, ticket: Hashable, are_good: Sequence[bool], now_s: float) -> TransferJob | None:
        """Note an ended piece with its successes; return the job if over."""
        job, keys = self._pieces.pop(ticket)
        self._count(job, -len(keys))
        results = list(zip(keys, are_good, strict=True))
        job.succeeded += tuple(key for key, is_good in results if is_good)
        job.failed += tuple(key for key, is_good in results if not is_good)
        return self._end_piece(job, now_s)

    def piece(self, ticket: Hashable) -> tuple[TransferJob, tuple[bytes, ...]] | None:
        """Return job and chunks of a ticket; None for other tickets."""
        return self._pieces.get(ticket)

    def _end_piece(self, job: TransferJob, now_s: float) -> TransferJob | None:
        job.pieces -= 1
        if job.pieces:
            return None
        job.seconds = now_s - job.began_s
        return self._jobs.pop(job.job_id)

    def _count(self, job: TransferJob, chunks: int) -> None:
        if job.is_load:
            self.loading += chunks
        else:
            self.storing += chunks
