"""Whether etcd may have forgotten what it granted: it has gone back, and no rebuild has come since. Pure.

A backup that is put in place under agents that run knows nothing of what was granted since, and two owners
may write the same segments: only who runs the agents can mend that. A rebuild knows as little, and says so of
each shard, so whoever claims one waits: nothing is left to be done by hand. It leaves in ``meta`` when it
was. That tells a new rebuild from one that a backup has brought back: the backup's was known before, or is
older than one that was.
"""

from __future__ import annotations

from ostraca_fabric.adapters.etcd.records import decode_rebuilt


class Past:
    """What one process knows of what etcd was before."""

    def __init__(self) -> None:
        """Know of nothing before."""
        self._went_back = ""
        self._rebuilt_unix_s = 0.0
        """When the newest rebuild was that was ever seen here; 0: none was."""

    def note_went_back(self, why: str) -> None:
        """Note that etcd no longer knows what it has told, and how that shows."""
        self._went_back = why

    def take(self, meta: bytes) -> None:
        """Take in the record, which can be read, of the fabric that is meant."""
        rebuilt_unix_s = decode_rebuilt(meta)
        if rebuilt_unix_s > self._rebuilt_unix_s:
            self._went_back, self._rebuilt_unix_s = "", rebuilt_unix_s

    @property
    def trouble(self) -> str:
        """What is to be done, and why; empty when nothing is."""
        if not self._went_back:
            return ""
        return (
            f"etcd has gone back to an older state, or was made anew ({self._went_back}), and may not know "
            "of what was granted since: stop all agents for late_write_s (120 s unless it is set), then "
            "start them"
        )
