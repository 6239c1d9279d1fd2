"""The driver's inbox, as its reader sleeps in ``select``."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from threading import get_ident

import pytest

from ostraca._operations.driver import Inbox

Put = Callable[[Inbox[str], str], None]


@pytest.fixture
def inbox() -> Inbox[str]:
    return Inbox("nothing")


def is_awake(inbox: Inbox[str]) -> bool:
    return inbox.descriptor in select.select([inbox.descriptor], [], [], 0.0)[0]


@pytest.mark.parametrize("put", [Inbox.put, Inbox.put_news], ids=["item", "news"])
def test_items_of_other_threads_wake_the_reader(inbox: Inbox[str], put: Put) -> None:
    inbox.watcher = get_ident()
    assert not is_awake(inbox)
    other = threading.Thread(target=put, args=(inbox, "item"))
    other.start()
    other.join()
    assert is_awake(inbox)
    assert inbox.get() == "item"


def test_an_item_of_a_finalizer_in_the_readers_thread_wakes_it_and_news_of_its_turn_need_not(
    inbox: Inbox[str],
) -> None:
    inbox.watcher = get_ident()
    inbox.put_news("news")
    assert not is_awake(inbox)
    inbox.put("released")
    assert is_awake(inbox)
    assert [inbox.get(), inbox.get()] == ["news", "released"]


def test_an_item_wakes_the_reader_though_a_signal_handler_raises_behind_it(inbox: Inbox[str]) -> None:
    class Interrupted:
        def put(self, item: str) -> None:
            items.put(item)
            raise KeyboardInterrupt

    items, inbox.watcher = inbox.items, get_ident()
    inbox.items = Interrupted()  # type: ignore[assignment]  # the handler runs behind the queue's own call
    with pytest.raises(KeyboardInterrupt):
        inbox.put("item")
    assert is_awake(inbox)
    assert inbox.get() == "item"


def test_nothing_is_written_for_a_reader_that_does_not_sleep_in_select(inbox: Inbox[str]) -> None:
    inbox.put("item")
    inbox.wake()
    assert not is_awake(inbox)
    assert [inbox.get(), inbox.get()] == ["item", "nothing"]
