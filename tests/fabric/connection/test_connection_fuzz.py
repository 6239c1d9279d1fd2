"""Whatever bytes come, whenever: the connection goes on or is refused with a reason, and no other notices."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric.connection.bulk import bulk_start
from tests.fabric.connection.peers import ANY, FRAME_BYTES_MAX, HANDSHAKE, HELLO, SETTINGS, Answering, Dial
from tests.fabric.wire.samples import SAMPLES

from ostraca_fabric.connection import connect, serve
from ostraca_fabric.wire.frames import HEADER_BYTES, LENGTH_BYTES, SCRATCH_BYTES, encode
from ostraca_fabric.wire.messages import AnyMessage, Message, Ping, Pong, Refused

CODES = {"version", "authentication", "transport", "limit", "protocol", "malformed", "frame_too_long"}

FRAMES = st.one_of(
    st.sampled_from(SAMPLES).map(encode).map(bytes),
    st.binary(max_size=40),
    st.integers(0, 3).flatmap(
        lambda count: st.builds(
            bulk_start,
            st.integers(0, 9),
            st.lists(st.integers(0, 9), min_size=count, max_size=count),
            st.lists(st.integers(0, 50), min_size=count, max_size=count),
        )
    ),
    st.builds(struct.Struct("<IB").pack, st.integers(0, 1 << 18), st.integers(0, 2)),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Frames, some of them with bytes changed, cut out or cut off."""
    stream = bytearray(b"".join(draw(st.lists(FRAMES, min_size=1, max_size=4))))
    for _ in range(draw(st.integers(0, 4))):
        if stream:
            stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        del stream[draw(st.integers(0, len(stream))) :]
    if draw(st.booleans()):
        del stream[: draw(st.integers(0, len(stream)))]
    return bytes(stream)


def messages(stream: bytes) -> list[AnyMessage]:
    """Take what a server said apart; everything it says is a whole, well-formed message."""
    found: list[AnyMessage] = []
    while stream:
        length, kind = struct.unpack_from("<IB", stream)
        assert kind == 0
        assert len(stream) >= LENGTH_BYTES + length
        found.append(ANY.decode(stream[HEADER_BYTES : LENGTH_BYTES + length]))
        stream = stream[LENGTH_BYTES + length :]
    return found


@given(before=st.sampled_from(["nothing", "hello", "welcome"]), stream=mutated(), cut=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
async def test_no_bytes_do_more_than_end_their_own_connection(before: str, stream: bytes, cut: int) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with tempfile.TemporaryDirectory() as folder:
        server = await serve(f"unix://{folder}/s", Answering(), HANDSHAKE, SETTINGS)
        healthy = await connect(server.address, HELLO)
        dial = Dial()
        peer = await (dial(server.address) if before != "welcome" else dial.welcomed(server.address))
        peer.write(bytes(encode(HELLO)) if before == "hello" else b"")
        peer.write(stream[:cut])
        await healthy.ask(Ping(1), 10.0)
        peer.write(stream[cut:])
        peer.end()
        said: list[Message] = [*messages(await peer.rest())]
        refusals = [each for each in said if isinstance(each, Refused)]
        assert refusals == said[len(said) - len(refusals) :], "a refusal is the last word"
        assert len(refusals) <= 1
        assert {each.code for each in refusals} <= CODES
        assert await healthy.ask(Ping(2), 10.0) == Pong(2)
        held = [connection._reader.held_bytes for connection in server.connections]
        assert max(held) <= max(SCRATCH_BYTES, FRAME_BYTES_MAX + LENGTH_BYTES)
        await dial.close()
        healthy.close()
        assert await server.close()
    assert complaints == []
