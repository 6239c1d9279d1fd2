"""Names of threads that the kernel shows."""

from __future__ import annotations

import threading
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue

import pytest

from ostraca_fabric.runtime.threads import BackgroundTask, show_name


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


FAR_S = 10.0


class Work:
    """Work whose turns wait for permission, and the task that repeats it."""

    def __init__(self, *, pause_s: float = 0.0) -> None:
        self.is_needed = True
        self.turns: SimpleQueue[str] = SimpleQueue()
        self.permissions: SimpleQueue[None] = SimpleQueue()
        self.series = 0
        self._pause_s = pause_s
        self.task = BackgroundTask(
            "test-task", self._turn, is_needed=lambda: self.is_needed, pauses_s=self._pauses_s
        )

    def _pauses_s(self) -> chain[float]:
        self.series += 1
        return chain((0.0,), repeat(self._pause_s))

    def _turn(self) -> None:
        self.turns.put(threading.current_thread().name)
        self.permissions.get()


def thread_ends() -> None:
    for each in threading.enumerate():
        if each.name == "ostraca-test-task":
            each.join(FAR_S)
            assert not each.is_alive()


def test_work_is_repeated_by_one_thread_while_needed() -> None:
    work = Work()
    work.task.start()
    work.task.start()
    for _ in range(3):
        assert work.turns.get(timeout=FAR_S) == "ostraca-test-task"
        assert work.turns.empty(), "there is a single thread"
        work.permissions.put(None)
    work.turns.get(timeout=FAR_S)
    work.is_needed = False
    work.permissions.put(None)
    thread_ends()
    assert work.turns.empty()


def test_work_needed_again_gets_a_new_thread_and_new_pauses() -> None:
    work = Work()
    for series in (1, 2):
        work.is_needed = True
        work.task.start()
        work.turns.get(timeout=FAR_S)
        work.is_needed = False
        work.permissions.put(None)
        thread_ends()
        assert work.series == series


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_an_error_ended_is_followed_by_another() -> None:
    def fail() -> None:
        failed.put(None)
        raise OSError("no descriptors are left")

    failed: SimpleQueue[None] = SimpleQueue()
    task = BackgroundTask("test-task", fail, is_needed=lambda: True, pauses_s=lambda: repeat(0.0))
    for _ in range(2):
        task.start()
        failed.get(timeout=FAR_S)
        thread_ends()


def test_work_not_needed_starts_no_thread() -> None:
    work = Work()
    work.is_needed = False
    work.task.start()
    assert work.series == 0


def test_a_close_ends_a_pause_and_starts_no_further_turn() -> None:
    work = Work(pause_s=3600.0)
    work.task.start()
    work.turns.get(timeout=FAR_S)
    work.permissions.put(None)
    work.task.close()
    thread_ends()
    assert work.task.is_closed
    work.task.start()
    assert work.turns.empty()
    assert work.series == 1


def test_a_process_without_more_threads_tries_again_at_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work = Work()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        work.task.start()
    assert work.series == 0
    work.task.start()
    work.turns.get(timeout=FAR_S)
    work.is_needed = False
    work.permissions.put(None)
    thread_ends()
