"""What a watch has told, for tests."""

from __future__ import annotations

from ostraca_fabric.adapters.etcd.told import Changed, Entry, Listed


def values(told: Listed | Changed) -> list[bytes]:
    """Return the values that were written, in a change: what is told anew as a list is not one."""
    assert isinstance(told, Changed), f"a change, and not {told}"
    return [change.value for change in told.changes if isinstance(change, Entry)]
