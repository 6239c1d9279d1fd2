"""Names of threads that the kernel shows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ostraca_fabric.threads import show_name


@pytest.mark.parametrize(("name", "shown"), [("nixl", "nixl"), ("as long as you like", "as long as you")])
def test_a_thread_shows_the_name_it_was_given_as_far_as_the_kernel_keeps_it(name: str, shown: str) -> None:
    seen: list[str] = []

    def work() -> None:
        show_name(name)
        seen.append(Path("/proc/thread-self/comm").read_text().strip())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [shown]
