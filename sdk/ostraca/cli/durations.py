"""Time spans as people read them."""

from __future__ import annotations

_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400


def duration_text(seconds: float) -> str:
    """Write a time span for people, to two units: ``17 s``, ``3 min 4 s``, ``2 d 5 h``."""
    whole = int(seconds)
    if whole >= _DAY_S:
        return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
    if whole >= _HOUR_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    if whole >= _MINUTE_S:
        return f"{whole // _MINUTE_S} min {whole % _MINUTE_S} s"
    return f"{whole} s"
