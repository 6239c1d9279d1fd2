"""What was done to a pod and what came of it, with times: what a reader of a violation wants to know."""

from __future__ import annotations

import time
from collections import Counter, deque

KEPT_MAX = 400


class Story:
    """Lines of what happened, the last ones of which are kept."""

    def __init__(self) -> None:
        self.deeds: Counter[str] = Counter()
        self._begun_s = time.monotonic()
        self._lines: deque[str] = deque(maxlen=KEPT_MAX)

    @property
    def passed_s(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._begun_s

    def tell(self, words: str) -> None:
        """Note that something happened now."""
        self._lines.append(f"{self.passed_s:8.2f} s  {words}")

    def chapter(self, words: str) -> None:
        """Forget what came before: it is over, and nothing was wrong."""
        self._lines.clear()
        self.tell(words)

    def told(self) -> str:
        """Return what happened since the chapter began."""
        return "\n".join(self._lines)
