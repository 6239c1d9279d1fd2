"""What happened in a history, in order, and whose doing it was."""

from __future__ import annotations

import logging
from collections import Counter, deque

from tests.simulation.shard.model import ViolationError
from tests.support.simulated.virtual_hosts import HostsLoop, running_host

_LINES = 4000
_DRIVES = "ostraca_fabric.drives.guarded_drive"
_FORGOTTEN = ("exception was never retrieved", "Task was destroyed but it is pending")


class Story:
    """The last lines of it. ``happened`` counts kinds of things."""

    def __init__(self, loop: HostsLoop) -> None:
        self._loop = loop
        self.lines: deque[str] = deque(maxlen=_LINES)
        self.happened: Counter[str] = Counter()

    def tell(self, who: str, what: str) -> None:
        now_s = self._loop.now_s
        self.lines.append(f"{now_s:12.6f} {who:10} {what}")

    def text(self, lines: int) -> str:
        return "\n".join(list(self.lines)[-lines:])


class Overheard(logging.Handler):
    """Puts into the story what processes log, and collects what they call a bug."""

    def __init__(self, story: Story) -> None:
        super().__init__(logging.INFO)
        self.bugs: list[str] = []
        self._story = story

    def check(self) -> None:
        """Raise what a process called a bug."""
        if self.bugs:
            raise ViolationError("\n".join(self.bugs))

    def emit(self, record: logging.LogRecord) -> None:
        host = running_host()
        if host is not None and host.is_dead:  # it is being torn down
            return
        said = record.getMessage()
        if any(
            each in said for each in _FORGOTTEN
        ):  # said when memory is cleared up, of what a dead process waited for
            return
        if record.levelno >= logging.ERROR and record.name != _DRIVES:  # a drive that has failed is no bug
            said = self.format(record)
            self.bugs.append(said)
        self._story.tell("-" if host is None else host.name, said)
