from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.errors import FrameTooLongError, MalformedError, ProtocolError
from ostraca_fabric.wire.frames import (
    BULK_BYTES_MAX,
    HEADER_BYTES,
    SCRATCH_BYTES,
    BulkEnd,
    Event,
    FrameReader,
    bulk_header,
    encode,
)
from ostraca_fabric.wire.messages import Ping, PutDone

LIMIT_BYTES = 300_000
DISCARDED = 13
"""Transfers with this number have no destination."""


class Memory:
    """Where bulk bytes land: offset = place. It says who asked, in order."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self.view = memoryview(bytearray(size_bytes))
        self.asked: list[tuple[int, int, int]] = []

    def sink(self, transfer: int, offset: int, length: int) -> memoryview | None:
        self.asked.append((transfer, offset, length))
        if transfer == DISCARDED:
            return None
        if offset + length > len(self.view):
            raise ProtocolError("outside the memory")
        return self.view[offset : offset + length]


def message_frame(payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload) + 1, 0) + payload


def bulk_frame(transfer: int, offset: int, payload: bytes) -> bytes:
    return bulk_header(transfer, offset, len(payload)) + payload


def fed(reader: FrameReader, stream: bytes, cuts: Sequence[int] = ()) -> list[Event]:
    """Feed a stream in reads that end at the cuts, and wherever the reader's buffer ends."""
    events: list[Event] = []
    for start, stop in zip((0, *cuts), (*cuts, len(stream)), strict=True):
        position = start
        while position < stop:
            buffer = reader.buffer()
            assert len(buffer), "an empty buffer would look like the end of the stream"
            count = min(len(buffer), stop - position)
            buffer[:count] = stream[position : position + count]
            position += count
            events.extend(reader.received(count))
    return events


def comparable(events: list[Event]) -> list[object]:
    return [(type(event), str(event)) if isinstance(event, ProtocolError) else event for event in events]


def test_a_message_frame_is_length_kind_and_msgpack() -> None:
    assert bytes(encode(Ping(3))) == b"\x04\x00\x00\x00\x00\x92\x17\x03"


def test_a_bulk_header_is_length_kind_transfer_and_offset() -> None:
    assert bulk_header(2, 3, 5) == struct.pack("<IBQQ", 22, 1, 2, 3)


FRAMES = st.one_of(
    st.binary(min_size=1, max_size=300).map(message_frame),
    st.builds(bulk_frame, st.integers(0, 20), st.integers(0, 5000), st.binary(max_size=400)),
    st.builds(lambda repeats: message_frame(bytes(range(256)) * repeats), st.integers(1, 1000)),
    st.sampled_from(
        [
            struct.pack("<IB", 0, 0),
            struct.pack("<IB", 1, 0),
            struct.pack("<IB", 9, 7),
            struct.pack("<IB", 16, 1),
            struct.pack("<IB", LIMIT_BYTES + 1, 0),
            struct.pack("<IB", BULK_BYTES_MAX + 18, 1),
            bulk_header(1, 1 << 40, 10),
        ]
    ),
)


@given(frames=st.lists(FRAMES, max_size=6), data=st.data())
def test_any_split_of_a_stream_gives_the_same_events_and_the_same_bytes(
    frames: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    whole, split = Memory(), Memory()
    expected = fed(FrameReader(whole.sink, frame_bytes_max=LIMIT_BYTES), stream)
    found = fed(FrameReader(split.sink, frame_bytes_max=LIMIT_BYTES, scratch_bytes=64), stream, cuts)
    assert comparable(found) == comparable(expected)
    assert split.asked == whole.asked
    assert split.view == whole.view


def test_bytes_one_by_one_give_the_same_events() -> None:
    frames = (
        encode(Ping(1)),
        bulk_frame(4, 100, b"abcdef"),
        bulk_frame(DISCARDED, 0, b"xyz"),
        encode(Ping(2)),
    )
    stream = b"".join(frames)
    memory = Memory()
    events = fed(FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES), stream, range(1, len(stream)))
    assert events == [
        bytes(frames[0][HEADER_BYTES:]),
        BulkEnd(4, 100, 6, landed=True),
        BulkEnd(DISCARDED, 0, 3, landed=False),
        bytes(frames[3][HEADER_BYTES:]),
    ]
    assert bytes(memory.view[100:106]) == b"abcdef"


def test_bulk_bytes_are_received_straight_into_their_destination() -> None:
    memory = Memory()
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES)
    fed(reader, bulk_header(1, 4096, 100_000) + b"head")
    buffer = reader.buffer()
    assert len(buffer) == 100_000 - 4, "exactly what is missing: the next frame's header goes elsewhere"
    buffer[0] = 77
    assert memory.view[4096 + 4] == 77


def test_the_sink_is_asked_after_earlier_messages_of_the_same_read_were_handled() -> None:
    order: list[str] = []

    def sink(transfer: int, offset: int, length: int) -> memoryview | None:
        order.append("sink")
        return None

    reader = FrameReader(sink, frame_bytes_max=LIMIT_BYTES)
    stream = bytes(encode(Ping(1))) + bulk_frame(1, 0, b"x")
    reader.buffer()[: len(stream)] = stream
    order.extend("message" for event in reader.received(len(stream)) if isinstance(event, bytes))
    assert order == ["message", "sink"]


def test_a_frame_over_the_limit_is_refused_at_its_header_and_costs_no_memory() -> None:
    reader = FrameReader(Memory().sink, frame_bytes_max=LIMIT_BYTES)
    first, error = fed(reader, bytes(encode(Ping(1))) + struct.pack("<IB", LIMIT_BYTES + 1, 0) + b"junk")
    assert first == b"\x92\x17\x01"
    assert isinstance(error, FrameTooLongError)
    assert reader.held_bytes == SCRATCH_BYTES
    assert fed(reader, bytes(encode(Ping(2)))) == []


def test_announcing_a_long_message_costs_no_memory_until_it_comes() -> None:
    reader = FrameReader(Memory().sink, frame_bytes_max=1 << 31)
    fed(reader, struct.pack("<IB", 1 << 30, 0) + bytes(1000))
    assert reader.held_bytes == SCRATCH_BYTES
    fed(reader, bytes(200_000))
    assert reader.held_bytes <= 4 * SCRATCH_BYTES


def test_a_long_message_makes_the_reader_grow_to_its_length_and_shrink_again() -> None:
    message = encode(PutDone(1, bytes(250_000), b""))
    reader = FrameReader(Memory().sink, frame_bytes_max=LIMIT_BYTES)
    held = []
    for part in range(0, len(message), 1000):
        events = fed(reader, bytes(message[part : part + 1000]))
        held.append(reader.held_bytes)
    assert events == [bytes(message[HEADER_BYTES:])]
    assert max(held) == len(message)
    reader.buffer()
    assert reader.held_bytes == SCRATCH_BYTES


def test_a_limit_raised_between_frames_holds_from_the_next_frame_on() -> None:
    reader = FrameReader(Memory().sink, frame_bytes_max=10)
    fed(reader, bytes(encode(Ping(1))))
    reader.frame_bytes_max = 1000
    assert fed(reader, message_frame(bytes(500))) == [bytes(500)]


def test_a_reader_that_is_closed_in_mid_payload_writes_nothing_more() -> None:
    memory = Memory()
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES)
    fed(reader, bulk_header(1, 0, 100) + b"\x01" * 10)
    reader.close()
    assert fed(reader, b"\x01" * 200) == []
    assert bytes(memory.view[:200]) == b"\x01" * 10 + bytes(190)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (struct.pack("<IB", 0, 0), MalformedError),
        (struct.pack("<IB", 1, 0), MalformedError),
        (struct.pack("<IB", 5, 2), MalformedError),
        (struct.pack("<IB", 16, 1), MalformedError),
        (struct.pack("<IB", 0xFFFFFFFF, 1), FrameTooLongError),
        (bulk_header(1, 1 << 50, 4), ProtocolError),
    ],
)
def test_a_frame_that_can_not_be_is_an_error_of_its_type(stream: bytes, error: type[ProtocolError]) -> None:
    (found,) = fed(FrameReader(Memory().sink, frame_bytes_max=LIMIT_BYTES), stream)
    assert type(found) is error
