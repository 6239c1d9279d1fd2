from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fabric.wire.samples import SAMPLES

from ostraca_fabric.errors import MalformedError, ProtocolError
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.frames import HEADER_BYTES, encode
from ostraca_fabric.wire.messages import SPANS_MAX, AnyMessage, Cancel, Hello, Lookup, Message, Ping, Resolve

DECODERS: dict[str, codec.MessageDecoder[object]] = {
    "hello": codec.HELLO,
    "from worker": codec.FROM_WORKER,
    "from agent": codec.FROM_AGENT,
    "from operator": codec.FROM_OPERATOR,
    "hello answer": codec.HELLO_ANSWER,
    "to worker": codec.TO_WORKER,
    "to agent": codec.TO_AGENT,
    "to operator": codec.TO_OPERATOR,
}
ANY: codec.MessageDecoder[AnyMessage] = codec.MessageDecoder(AnyMessage, sender="anyone")


def payload(message: Message) -> bytes:
    return bytes(encode(message)[HEADER_BYTES:])


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(sample) for sample in SAMPLES} == set(codec.MESSAGE_TYPES.values())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message: AnyMessage) -> None:
    assert ANY.decode(payload(message)) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_later_version_may_append_a_field(message: AnyMessage) -> None:
    fields = msgspec.msgpack.decode(payload(message))
    assert ANY.decode(msgspec.msgpack.encode([*fields, {"later": [1]}])) == message


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_no_truncated_message_is_taken_for_another(message: AnyMessage) -> None:
    whole = payload(message)
    for length in range(len(whole)):
        with pytest.raises(MalformedError):
            ANY.decode(whole[:length])


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("hello", Ping(1)),
        ("from worker", Resolve(1, 1.0, 1.0, ())),
        ("from operator", SAMPLES[8]),
        ("to agent", Cancel(1)),
    ],
)
def test_a_message_out_of_place_is_a_protocol_error_that_names_it(decoder: str, message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__) as caught:
        DECODERS[decoder].decode(payload(message))
    assert caught.value.code == "protocol"


def test_an_unknown_type_is_named_by_its_number() -> None:
    with pytest.raises(MalformedError, match="unknown type 99") as caught:
        codec.FROM_WORKER.decode(msgspec.msgpack.encode([99, 1]))
    assert caught.value.code == "malformed"


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x90",
        b"\x92\x17\xa1a",
        b"\x92\x17\x01\x01",
        b"\x91\x17",
        b"\x93\x03\xa2\xff\xfe\xa1a",
        b"\x93\x17\x01" + b"\x91" * 100_000,
        b"\x91" * 100_000,
        b"\x92\x2e\xdd\xff\xff\xff\xff",
        b"\x92\x18\xc6\xff\xff\xff\xff",
    ],
    ids=[
        "nothing",
        "no msgpack",
        "a map",
        "an empty array",
        "a wrong type",
        "trailing bytes",
        "a field missing",
        "no UTF-8",
        "deep nesting behind",
        "deep nesting",
        "an array of 4 billion",
        "4 GiB of bytes",
    ],
)
def test_junk_is_malformed(junk: bytes) -> None:
    with pytest.raises(MalformedError):
        ANY.decode(junk)


@given(st.sampled_from(sorted(DECODERS)), st.sampled_from(SAMPLES), st.data())
def test_nothing_but_a_protocol_error_comes_of_changed_bytes(
    decoder: str, message: AnyMessage, data: st.DataObject
) -> None:
    changed = bytearray(payload(message))
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = DECODERS[decoder].decode(bytes(changed))
    except ProtocolError:
        return
    assert isinstance(decoded, Message)


@given(st.binary(max_size=60))
def test_nothing_but_a_protocol_error_comes_of_random_bytes(junk: bytes) -> None:
    try:
        decoded = codec.HELLO.decode(junk)
    except ProtocolError:
        return
    assert isinstance(decoded, Hello)


def test_a_request_of_too_many_spans_is_refused_before_they_are_looked_at() -> None:
    nothing = [b"", 8, b"", [], 0, 0]
    good = msgspec.msgpack.encode([12, 1, 0, 0.1, [nothing] * SPANS_MAX])
    assert isinstance(codec.FROM_WORKER.decode(good), Lookup)
    with pytest.raises(MalformedError, match="length"):
        codec.FROM_WORKER.decode(msgspec.msgpack.encode([12, 1, 0, 0.1, [nothing] * (SPANS_MAX + 1)]))
