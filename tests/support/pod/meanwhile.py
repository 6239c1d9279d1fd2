"""What a worker does over and over while a test does something else."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

_BREATH_S = 0.05
"""Between two rounds, so that what is tested has the processor: without it a worker takes all of one."""


class Meanwhile(ABC):
    """Work in a thread of its own, for as long as a ``with`` block lasts.

    What fails there fails the test at its end.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failed: BaseException | None = None

    @abstractmethod
    def work(self) -> None:
        """Do it over and over, while it ``goes_on``."""

    def goes_on(self) -> bool:
        """Take breath; say whether there is to be another round."""
        return not self._is_over.wait(_BREATH_S)

    @property
    def has_failed(self) -> bool:
        return self._failed is not None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 (raised again where the test waits)
            self._failed = error
