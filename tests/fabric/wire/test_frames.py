from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.fabric.connection.bulk import bulk_frame, bulk_start

from ostraca_fabric.errors import FrameTooLongError, MalformedError, ProtocolError
from ostraca_fabric.wire.frames import (
    BULK_BLOCKS_MAX,
    BULK_BYTES_MAX,
    CUT_BYTES,
    HEADER_BYTES,
    SCRATCH_BYTES,
    BulkEnd,
    Event,
    FrameReader,
    Passage,
    bulk_frames,
    encode,
)
from ostraca_fabric.wire.messages import Ping, PutDone

LIMIT_BYTES = 300_000
DISCARDED = 13
"""Transfers with this number have no destination."""


class Memory:
    """Where blocks land: their place is an offset. It says who asked, in order."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self.array = np.zeros(size_bytes, np.uint8)
        self.asked: list[tuple[int, list[int], list[int]]] = []

    def sink(self, transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
        self.asked.append((transfer, places.tolist(), lengths.tolist()))
        if transfer == DISCARDED:
            return None
        if (places + lengths > len(self.array)).any():
            raise ProtocolError("outside the memory")
        return Passage(self.array, places.astype(np.int64), lengths)


def message_frame(payload: bytes) -> bytes:
    return struct.pack("<IB", len(payload) + 1, 0) + payload


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
    return [each if isinstance(each, bytes) else _shown(each) for each in events]


def _shown(event: BulkEnd | ProtocolError) -> tuple[object, ...]:
    if isinstance(event, BulkEnd):
        return event.transfer, event.places.tolist(), event.landed
    return type(event), str(event)


def test_a_message_frame_is_length_kind_and_msgpack() -> None:
    assert bytes(encode(Ping(3))) == b"\x04\x00\x00\x00\x00\x92\x17\x03"


def test_a_bulk_frame_is_length_kind_transfer_count_places_lengths_and_the_blocks() -> None:
    memory = np.frombuffer(b"..abc..defgh", np.uint8)
    (frame,) = bulk_frames(
        2, memory, places=np.array([3, 9], "<u8"), offsets=np.array([7, 2]), lengths=np.array([5, 3], "<u4")
    )
    assert frame.header == struct.pack("<IBQIQQII", 1 + 8 + 4 + 16 + 8 + 8, 1, 2, 2, 3, 9, 5, 3)
    assert frame.header == bulk_start(2, [3, 9], [5, 3])
    assert bytes(frame.blocks.next_piece()) == b"defgh"
    frame.blocks.passed_bytes = 6
    assert bytes(frame.blocks.next_piece()) == b"bc"


@given(st.lists(st.sampled_from([1, 4096, CUT_BYTES // 4, CUT_BYTES, 2 * CUT_BYTES]), max_size=40))
@example([4096] * (2 * BULK_BLOCKS_MAX + 1))
@example([CUT_BYTES + 1] * 3)
def test_blocks_are_cut_into_frames_in_order_and_within_limits(lengths: list[int]) -> None:
    memory, places = np.zeros(2 * CUT_BYTES, np.uint8), np.arange(len(lengths), dtype=np.uint64)
    offsets, column = np.zeros(len(lengths), np.int64), np.array(lengths, np.uint32)
    frames = bulk_frames(1, memory, places=places, offsets=offsets, lengths=column)
    named: list[int] = []
    for frame in frames:
        count = struct.unpack_from("<I", frame.header, 13)[0]
        found = np.frombuffer(frame.header, "<u8", count, 17).tolist()
        assert 1 <= count <= BULK_BLOCKS_MAX
        assert count == 1 or frame.blocks.total_bytes <= CUT_BYTES
        assert frame.blocks.total_bytes == sum(lengths[place] for place in found)
        named += found
    assert named == list(range(len(lengths)))


BLOCKS = st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=200))

FRAMES = st.one_of(
    st.binary(min_size=1, max_size=300).map(message_frame),
    st.builds(
        lambda transfer, blocks: bulk_frame(transfer, *blocks),
        st.integers(0, 20),
        st.lists(BLOCKS, min_size=1, max_size=8),
    ),
    st.builds(lambda repeats: message_frame(bytes(range(256)) * repeats), st.integers(1, 1000)),
    st.sampled_from(
        [
            struct.pack("<IB", 0, 0),
            struct.pack("<IB", 1, 0),
            struct.pack("<IB", 9, 7),
            struct.pack("<IB", 12, 1),
            struct.pack("<IB", LIMIT_BYTES + 1, 0),
            struct.pack("<IB", BULK_BYTES_MAX + 14, 1),
            bulk_start(1, [1 << 40], [10]),
            bulk_start(1, range(BULK_BLOCKS_MAX), [1] * BULK_BLOCKS_MAX) + b"x" * BULK_BLOCKS_MAX,
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
    assert np.array_equal(split.array, whole.array)


def test_bytes_one_by_one_give_the_same_events() -> None:
    frames = (
        encode(Ping(1)),
        bulk_frame(4, (100, b"abcdef"), (50, b"z"), (106, b"gh")),
        bulk_frame(DISCARDED, (0, b"xyz"), (9, b"!")),
        encode(Ping(2)),
    )
    stream = b"".join(frames)
    memory = Memory()
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES, scratch_bytes=17)
    events = fed(reader, stream, range(1, len(stream)))
    assert comparable(events) == [
        bytes(frames[0][HEADER_BYTES:]),
        (4, [100, 50, 106], True),
        (DISCARDED, [0, 9], False),
        bytes(frames[3][HEADER_BYTES:]),
    ]
    assert bytes(memory.array[100:108]) == b"abcdefgh"
    assert bytes(memory.array[50:51]) == b"z"
    assert np.count_nonzero(memory.array) == 9


def test_blocks_are_received_straight_into_their_destination() -> None:
    memory = Memory()
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES)
    fed(reader, bulk_start(1, [4096, 8192 * 4], [100, 50_000]) + b"head")
    assert reader.landing is not None
    assert reader.landing.left_bytes == 50_096
    buffer = reader.buffer()
    assert len(buffer) == 96, "exactly what the block lacks: the next one's bytes go elsewhere"
    buffer[0] = 77
    assert memory.array[4096 + 4] == 77
    fed(reader, bytes(100))
    assert len(reader.buffer()) == 50_000 - 4


@given(cut=st.integers(0, 400))
def test_after_a_diversion_nothing_lands_and_the_stream_goes_on(cut: int) -> None:
    """Wherever the frame is cut, before and in its blocks, and behind."""
    memory, other = Memory(), Memory()
    frame, follows = bulk_frame(3, (10, b"a" * 100), (500, b"b" * 200)), bytes(encode(Ping(1)))
    cut = min(cut, len(frame))
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES)
    events = fed(reader, frame[:cut])
    reader.divert(other.array)
    is_begun = len(bulk_start(3, [10, 500], [100, 200])) <= cut < len(frame)
    assert (reader.landing is not None) == is_begun, "other memory is nothing to divert"
    reader.divert(memory.array)
    assert reader.landing is None
    before = memory.array.copy()
    events += fed(reader, frame[cut:] + follows)
    assert comparable(events) == [(3, [10, 500], not is_begun), follows[HEADER_BYTES:]]
    if is_begun:
        assert np.array_equal(memory.array, before)


def test_bytes_behind_the_blocks_of_one_call_are_the_next_frames() -> None:
    memory = Memory()
    reader = FrameReader(memory.sink, frame_bytes_max=LIMIT_BYTES)
    fed(reader, bulk_start(1, [0, 10], [2, 3]))
    landing, tail = reader.landing, reader.tail()
    assert landing is not None
    follows = bytes(encode(Ping(1)))
    tail[: len(follows)] = follows
    bulk, message = reader.received(landing.left_bytes + len(follows))
    assert comparable([bulk, message]) == [(1, [0, 10], True), follows[HEADER_BYTES:]]
    assert reader.landing is None


def test_the_sink_is_asked_after_earlier_messages_of_the_same_read_were_handled() -> None:
    order: list[str] = []

    def sink(transfer: int, places: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> Passage | None:
        order.append("sink")
        return None

    reader = FrameReader(sink, frame_bytes_max=LIMIT_BYTES)
    stream = bytes(encode(Ping(1))) + bulk_frame(1, (0, b"x"))
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
    fed(reader, bulk_start(1, [0, 50], [50, 50]) + b"\x01" * 60)
    reader.close()
    assert reader.landing is None
    assert fed(reader, b"\x01" * 200) == []
    assert bytes(memory.array[:200]) == b"\x01" * 60 + bytes(140)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (struct.pack("<IB", 0, 0), MalformedError),
        (struct.pack("<IB", 1, 0), MalformedError),
        (struct.pack("<IB", 5, 2), MalformedError),
        (struct.pack("<IB", 12, 1), MalformedError),
        (struct.pack("<IB", 0xFFFFFFFF, 1), FrameTooLongError),
        (bulk_start(1, [1 << 50], [4]), ProtocolError),
        (bulk_start(1, [], []), MalformedError),
        (bulk_start(1, [0, 1], [4, 0]), MalformedError),
        (struct.pack("<IBQIQI", 28, 1, 1, 1, 0, 4), MalformedError),
        (struct.pack("<IBQIQI", 30, 1, 1, 1, 0, 4), MalformedError),
        (struct.pack("<IBQIQQII", 40, 1, 1, 2, 0, 1, 0xFFFFFFFF, 0xFFFFFFFF), MalformedError),
        (struct.pack("<IBQI", 13, 1, 1, 1), MalformedError),
        (struct.pack("<IBQI", 1 << 20, 1, 1, BULK_BLOCKS_MAX + 1), MalformedError),
        (struct.pack("<IBQI", 1 << 20, 1, 1, 0xFFFFFFFF), MalformedError),
    ],
)
def test_a_frame_that_can_not_be_is_an_error_of_its_type(stream: bytes, error: type[ProtocolError]) -> None:
    (found,) = fed(FrameReader(Memory().sink, frame_bytes_max=LIMIT_BYTES), stream)
    assert type(found) is error
