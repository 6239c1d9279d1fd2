"""Jobs of the engine, and the requests to the fabric that each of them became.

A job moves several chunks for one request of the engine. It is over when every piece of it is, and then tells
which chunks succeeded; the engine's rows stay pinned until it has been told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True)
class Finished:
    """A job is over."""

    job_id: int
    request: str
    is_load: bool
    succeeded: tuple[bytes, ...]
    failed: tuple[bytes, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks of a job under one ticket."""

    job_id: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class _Job:
    request: str
    is_load: bool
    begun_s: float
    pieces: int = 0
    succeeded: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)


class Transfers:
    """What is under way. *ticket* may be any hashable value that names one request to the fabric."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._pieces: dict[Hashable, Piece] = {}
        self.loading = 0
        """Chunks of loads under way."""
        self.storing = 0
        """Chunks of stores under way."""

    def __len__(self) -> int:
        """Count the jobs that are not over."""
        return len(self._jobs)

    def begin(self, job_id: int, *, request: str, is_load: bool, now_s: float) -> None:
        """Begin a job; then ``sent`` and ``refused`` for all of its chunks, then ``sealed`` once."""
        self._jobs[job_id] = _Job(request, is_load, now_s, pieces=1)

    def sent(self, job_id: int, ticket: Hashable, keys: Sequence[bytes]) -> None:
        """These chunks are on their way; ``ended`` must follow for the ticket."""
        job = self._jobs[job_id]
        job.pieces += 1
        self._pieces[ticket] = Piece(job_id, tuple(keys))
        self._count(job, len(keys))

    def refused(self, job_id: int, keys: Sequence[bytes]) -> None:
        """These chunks were not tried."""
        self._jobs[job_id].failed.extend(keys)

    def sealed(self, job_id: int, now_s: float) -> Finished | None:
        """Nothing more belongs to the job; return its end when nothing of it is under way."""
        return self._one_less(job_id, now_s)

    def ended(self, ticket: Hashable, are_good: Sequence[bool], now_s: float) -> Finished | None:
        """A piece is over: which of its chunks succeeded. Return the job's end when this was its last."""
        piece = self._pieces.pop(ticket)
        job = self._jobs[piece.job_id]
        self._count(job, -len(piece.keys))
        for key, is_good in zip(piece.keys, are_good, strict=True):
            (job.succeeded if is_good else job.failed).append(key)
        return self._one_less(piece.job_id, now_s)

    def piece(self, ticket: Hashable) -> Piece | None:
        """Return what is under a ticket; None when it is no piece of a job."""
        return self._pieces.get(ticket)

    def is_load(self, job_id: int) -> bool:
        """Tell the direction of a job that is not over."""
        return self._jobs[job_id].is_load

    def _one_less(self, job_id: int, now_s: float) -> Finished | None:
        job = self._jobs[job_id]
        job.pieces -= 1
        if job.pieces:
            return None
        del self._jobs[job_id]
        return Finished(
            job_id,
            job.request,
            job.is_load,
            tuple(job.succeeded),
            tuple(job.failed),
            now_s - job.begun_s,
        )

    def _count(self, job: _Job, chunks: int) -> None:
        if job.is_load:
            self.loading += chunks
        else:
            self.storing += chunks
