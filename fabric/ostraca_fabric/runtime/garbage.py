"""Garbage collection in a server process.

Python searches for unreachable cycles of objects while all threads wait. A full search visits every object:
tens of milliseconds in an agent, again and again while workers put blocks (``python -m benchmarks
garbage_collections``). Almost all of these objects were made at the start, and live until the end.
"""

from __future__ import annotations

import gc

_YOUNG_MAX = 5_000
"""Objects made, and not freed, before a search among them. Requests under way make more than Python's 700,
and leave no cycles behind."""


def keep_present_objects() -> None:
    """Search once, then leave the present objects out of all later searches. Call after the start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_MAX)
