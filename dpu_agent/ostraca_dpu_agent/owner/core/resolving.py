"""Finding blocks for readers: extents, pins, and promises that what was found stays to be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_dpu_agent.owner.core.answers import Resolution
from ostraca_fabric.rows import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ostraca_dpu_agent.owner.core.shard import ShardCore


def resolved(
    core: ShardCore, now_s: float, keys: NDArray[np.uint8], *, pin_s: float, promises: bool, is_counted: bool
) -> Resolution:
    """Answer ``ShardCore.resolve``."""
    rows, end_s = core.index.find(keys), now_s + min(pin_s, core.settings.pin_max_s)
    if pin_s > 0 and len(core.pins) >= core.settings.pins_max:
        rows[:] = -1
    if promises:
        _promise(core, rows, end_s)
    found = rows >= 0
    offsets, lengths, tags = core.index.read(rows, is_counted=is_counted)
    generations, pin = np.zeros(len(rows), np.uint64), 0
    hits = int(np.count_nonzero(found))
    if hits:
        segments = core.ring.segment_of(offsets[found])
        generations[found] = core.ring.generations[segments]
        if pin_s > 0:
            pin = core.pins.add(end_s, distinct(segments))
    core.counted["keys_asked"] += len(rows)
    core.counted["keys_found"] += hits
    return Resolution(found, offsets, lengths, generations, tags, pin)


def known(core: ShardCore, keys: NDArray[np.uint8], *, is_counted: bool) -> NDArray[np.bool_]:
    """Answer ``ShardCore.has``."""
    found, hits = core.index.has(keys, is_counted=is_counted)
    core.counted["keys_asked"] += len(found)
    core.counted["keys_found"] += hits
    return found


def _promise(core: ShardCore, rows: NDArray[np.intp], end_s: float) -> None:
    """Promise the blocks of these rows of the index until then; rows that can't be become -1.

    What lies in a withheld segment can't be: an earlier owner may yet use it for other blocks.
    """
    found = np.flatnonzero(rows >= 0)
    segments = core.ring.segment_of(core.index.offsets(rows[found]))
    may_last = core.promises.may_last(segments, end_s) & ~core.grants.is_withheld[segments]
    rows[found[~may_last]] = -1
    core.promises.make(segments[may_last], end_s)
