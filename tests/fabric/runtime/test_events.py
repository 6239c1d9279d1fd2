"""Events between threads."""

from __future__ import annotations

import os
import select

from ostraca_fabric.runtime.events import clear_event, set_event


def is_readable(event: int) -> bool:
    return event in select.select([event], [], [], 0.0)[0]


def test_an_event_is_readable_from_set_to_clear() -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        clear_event(event)  # of nothing: no wait, no error
        set_event(event)
        set_event(event)
        assert is_readable(event)
        clear_event(event)
        assert not is_readable(event)
    finally:
        os.close(event)


def test_each_clear_of_a_semaphore_counts_off_one() -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    try:
        set_event(event)
        set_event(event)
        clear_event(event)
        assert is_readable(event)
        clear_event(event)
        assert not is_readable(event)
    finally:
        os.close(event)
