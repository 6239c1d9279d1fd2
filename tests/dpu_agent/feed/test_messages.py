"""Messages of the feed, in the form of Mooncake's events for Dynamo."""

from __future__ import annotations

import msgspec

from ostraca_dpu_agent.feed.messages import FeedMessages
from ostraca_dpu_agent.feed.pages import PageEvent


def test_a_message_has_a_number_and_events() -> None:
    messages = FeedMessages(key_prefix="ostraca", tenant="default", first=7)
    page = bytes(range(32))
    events = [PageEvent(page, is_removed=False), PageEvent(page, is_removed=True)]
    ((topic, number, batch),) = messages.batches(events, at_ms=123)
    key = f"ostraca_{page.hex()}__k"
    named = {"object_key": key, "tenant_id": "default"}
    assert (topic, int.from_bytes(number, "big")) == (b"", 7)
    assert msgspec.msgpack.decode(batch) == [
        123,
        [{"event_type": "stored", **named}, {"event_type": "removed", **named}],
        0,
    ]


def test_many_events_take_several_messages_and_none_take_one() -> None:
    messages = FeedMessages(key_prefix="p", tenant="t", first=0)
    events = [PageEvent(number.to_bytes(32, "big"), is_removed=False) for number in range(2500)]
    sent = [*messages.batches(events, at_ms=0), *messages.batches([], at_ms=0)]
    assert [int.from_bytes(number, "big") for _, number, _ in sent] == [0, 1, 2, 3]
    assert [len(msgspec.msgpack.decode(batch)[1]) for *_, batch in sent] == [1000, 1000, 500, 0]
