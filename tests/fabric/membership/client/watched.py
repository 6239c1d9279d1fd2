"""What a watch has told, for tests."""

from __future__ import annotations

from ostraca_fabric.membership.etcd.client.watch_events import Entry, EntryChanges, EntryList


def values(told: EntryList | EntryChanges) -> list[bytes]:
    """Return the values that were written, in a change: what is told anew as a list is not one."""
    assert isinstance(told, EntryChanges), f"a change, and not {told}"
    return [change.value for change in told.changes if isinstance(change, Entry)]
