"""What every number of some settings must be, so that none makes a daemon that does nothing, or nothing else.
Pure.
"""

from __future__ import annotations

from ostraca_fabric.errors import UsageError


def check_above_zero(settings: object, *names: str) -> None:
    """Refuse a time, a size or a rate that is not above 0. Raises UsageError."""
    for name in names:
        if not getattr(settings, name) > 0:  # so that what is no number is refused as well
            raise UsageError(f"{name} is {getattr(settings, name)}: make it more than 0")


def check_one_at_least(settings: object, *names: str) -> None:
    """Refuse a count that is below 1. Raises UsageError."""
    for name in names:
        if getattr(settings, name) < 1:
            raise UsageError(f"{name} is {getattr(settings, name)}: make it 1 or more")
