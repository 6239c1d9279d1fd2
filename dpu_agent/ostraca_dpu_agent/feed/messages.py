"""Messages of the feed, as Dynamo's router reads them (``--shared-cache-type hicache``). Pure.

A message has three frames: a topic, a sequence number (u64, big-endian) and a batch in msgpack. A router that
misses a number forgets all pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from ostraca_dpu_agent.feed.pages import PageEvent

_EVENTS = 1000
"""Events of a batch."""

_SUFFIX = "k"
"""Part of a page's only object, for workers that declare a model with latent attention and a single rank."""


class FeedMessages:
    """Sequence of messages."""

    def __init__(self, *, key_prefix: str, tenant: str, first: int) -> None:
        """Begin with the number *first*, above all numbers sent before."""
        self._key_prefix = key_prefix
        self._tenant = tenant
        self._next = first

    def batches(self, events: Sequence[PageEvent], *, at_ms: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield messages with all events; a message without events if there are none."""
        rest = iter(events)
        batch = list(islice(rest, _EVENTS))
        while True:
            yield b"", self._next.to_bytes(8, "big"), self._encode(batch, at_ms)
            self._next += 1
            if not (batch := list(islice(rest, _EVENTS))):
                return

    def _encode(self, events: Iterable[PageEvent], at_ms: int) -> bytes:
        named = [
            {
                "event_type": "removed" if event.is_removed else "stored",
                "object_key": f"{self._key_prefix}_{event.page.hex()}__{_SUFFIX}",
                "tenant_id": self._tenant,
            }
            for event in events
        ]
        return msgspec.msgpack.encode([at_ms, named, 0])
