"""Joining extents that lie next to each other into one I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.ports.drive import Run

if TYPE_CHECKING:
    from collections.abc import Iterable


def joined(extents: Iterable[tuple[int, memoryview, int]]) -> tuple[list[Run], list[list[int]]]:
    """Join (drive offset, memory, row) extents, given in order of offset, into runs.

    Returns the runs, and for each run the rows it covers.
    """
    runs: list[Run] = []
    members: list[list[int]] = []
    views: list[memoryview] = []
    start = end = -1
    for offset, view, row in extents:
        if offset == end:
            views.append(view)
            members[-1].append(row)
        else:
            if views:
                runs.append(Run(start, tuple(views)))
            start, views = offset, [view]
            members.append([row])
        end = offset + len(view)
    if views:
        runs.append(Run(start, tuple(views)))
    return runs, members
