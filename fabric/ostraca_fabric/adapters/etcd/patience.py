"""How long a process that ends waits for an etcd that is away: once, and not for each thing that it would
still say there. What is not said then, the end of its lease says.
"""

from __future__ import annotations

from ostraca_fabric.errors import StoreAwayError


class Patience:
    """Shared by all that ask etcd for one membership, in whatever thread."""

    def __init__(self) -> None:
        """Wait as long as the settings say, each time."""
        self._is_short = False
        self._failed = ""

    def shorten(self) -> None:
        """From the next thing on that fails because etcd is away, ask for nothing more."""
        self._is_short = True

    def note(self, error: StoreAwayError) -> None:
        """Take in that etcd was waited for, in vain."""
        if self._is_short and not self._failed:
            self._failed = str(error)

    def check(self, what: str) -> None:
        """Raise StoreAwayError where etcd is not to be asked any more; *what* says for what."""
        if self._failed:
            raise StoreAwayError(f"etcd was not asked to {what}: it was away a moment ago, and I am stopping")
