"""Decoding of messages and of their columns, and refusal of all other bytes.

Unacceptable bytes always end in ProtocolError; no other exception leaves this module. A known message out of
place raises plain ProtocolError; anything else raises MalformedError.

A column has a value for each block, as the little-endian bytes of a numpy array. Reading checks the length
against the number of blocks in the rest of the message, so that no other module meets a short column.
"""

from __future__ import annotations

import typing
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.errors import MalformedError, ProtocolError
from ostraca_fabric.model.outcome import Reason
from ostraca_fabric.wire.messages import (
    AgentAnswer,
    AgentRequest,
    AnswerToAgent,
    AnswerToOperator,
    AnyMessage,
    Cancel,
    Fetch,
    GetExtents,
    GetProgress,
    Hello,
    Leaving,
    Message,
    OperatorRequest,
    OwnerNotice,
    Ping,
    Pong,
    Refused,
    Settled,
    StatusDone,
    StatusRequest,
    Welcome,
    WorkerNotice,
    WorkerRequest,
)

M_co = TypeVar("M_co", covariant=True)
B = TypeVar("B")

MESSAGE_TYPES: dict[int, type[Message]] = {
    message_type.__struct_config__.tag: message_type for message_type in typing.get_args(AnyMessage)
}
"""All messages by tag."""


class MessageDecoder(Generic[M_co]):
    """Decoder for the messages of one kind of sender."""

    def __init__(self, accepted: Any, *, sender: str) -> None:  # noqa: ANN401 (a union has no better type)
        self._decode = msgspec.msgpack.Decoder(accepted).decode
        self._sender = sender

    def decode(self, payload: bytes) -> M_co:
        """Return the message. Raises only MalformedError or ProtocolError."""
        try:
            return typing.cast("M_co", self._decode(payload))
        # ValueError covers msgspec's own errors and bad UTF-8; endless nesting raises RecursionError.
        except (ValueError, RecursionError) as error:
            raise self._refusal(payload, error) from error

    def _refusal(self, payload: bytes, error: Exception) -> ProtocolError:
        try:
            tag = msgspec.msgpack.decode(msgspec.msgpack.decode(payload, type=list[msgspec.Raw])[0], type=int)
        except (ValueError, RecursionError, IndexError):
            return MalformedError(f"not a message: {error}")
        if tag not in MESSAGE_TYPES:
            return MalformedError(f"a message of unknown type {tag}")
        name = MESSAGE_TYPES[tag].__name__
        try:
            _DECODE_ANY(payload)
        except (ValueError, RecursionError):
            return MalformedError(f"not a {name}: {error}")
        return ProtocolError(f"{name} is not accepted from {self._sender}")


_DECODE_ANY = msgspec.msgpack.Decoder(AnyMessage).decode

HELLO: MessageDecoder[Hello] = MessageDecoder(Hello, sender="a caller before Hello")
"""First message accepted by an agent."""

FROM_WORKER: MessageDecoder[WorkerRequest | WorkerNotice] = MessageDecoder(
    WorkerRequest | WorkerNotice, sender="a worker"
)
FROM_AGENT: MessageDecoder[AgentRequest | OwnerNotice | Cancel | Ping | StatusRequest] = MessageDecoder(
    AgentRequest | OwnerNotice | Cancel | Ping | StatusRequest, sender="an agent"
)
FROM_OPERATOR: MessageDecoder[OperatorRequest | Cancel] = MessageDecoder(
    OperatorRequest | Cancel, sender="an operator"
)

HELLO_ANSWER: MessageDecoder[Welcome | Refused] = MessageDecoder(
    Welcome | Refused, sender="an agent before Welcome"
)
"""Messages accepted after a Hello was sent."""

TO_WORKER: MessageDecoder[AgentAnswer | GetProgress | GetExtents | Settled | Fetch | Leaving | Refused] = (
    MessageDecoder(
        AgentAnswer | GetProgress | GetExtents | Settled | Fetch | Leaving | Refused,
        sender="a worker's agent",
    )
)
TO_AGENT: MessageDecoder[AnswerToAgent | Pong | StatusDone | Refused] = MessageDecoder(
    AnswerToAgent | Pong | StatusDone | Refused, sender="an agent to an agent"
)
TO_OPERATOR: MessageDecoder[AnswerToOperator | Refused] = MessageDecoder(
    AnswerToOperator | Refused, sender="an agent to an operator"
)


def read_body(body: bytes, kind: type[B]) -> B:
    """Decode a message's body, separate msgpack. Raises MalformedError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"no {kind.__name__}: {error}") from error


Rows = slice | NDArray[np.bool_] | NDArray[np.integer]
"""Some of the blocks: a slice, a mask or positions."""

U8: np.dtype[np.uint8] = np.dtype("u1")
U32: np.dtype[np.uint32] = np.dtype("<u4")
U64: np.dtype[np.uint64] = np.dtype("<u8")
_Value = TypeVar("_Value", np.uint8, np.uint32, np.uint64)

KEY_BYTES = 16
TAG_BYTES = 16


def filled(count: int, code: int) -> NDArray[np.uint8]:
    """Return a column with the same code for *count* blocks."""
    column = np.empty(count, U8)
    column.fill(int(code))  # numpy takes thrice as long for an enum's member
    return column


def u8(column: bytes, count: int) -> NDArray[np.uint8]:
    """Return a column of *count* bytes."""
    return _read("u8", column, U8, count)


def u32(column: bytes, count: int) -> NDArray[np.uint32]:
    """Return a column of *count* 32-bit values."""
    return _read("u32", column, U32, count)


def u64(column: bytes, count: int) -> NDArray[np.uint64]:
    """Return a column of *count* 64-bit values."""
    return _read("u64", column, U64, count)


def rows16(column: bytes, count: int) -> NDArray[np.uint8]:
    """Return *count* keys or tags: shape (count, 16)."""
    return _read("16-byte", column, U8, count * 16).reshape(count, 16)


def distinct(numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the distinct values of a column of small non-negative numbers, in order.

    Time and memory are proportional to the largest number; a tenth of the time of ``np.unique`` for a few
    numbers.
    """
    return np.bincount(numbers).nonzero()[0]  # ``np.flatnonzero`` takes five times as long


def are_distinct(numbers: NDArray[np.integer[Any]]) -> bool:
    """Tell whether no number occurs twice.

    The first ``np.unique`` of a process imports modules for up to 0.1 s, out of an operation's deadline.
    """
    return len(set(numbers.tolist())) == len(numbers)  # a sort of numpy would give the GIL up


def positions(column: bytes, blocks: int) -> NDArray[np.uint32]:
    """Return positions in a request, each checked to be below *blocks*."""
    found = _read("position", column, U32, len(column) // U32.itemsize)
    # ``max`` of numpy is a function of Python, and takes thrice as long.
    if len(found) and (last := int(found[found.argmax()])) >= blocks:
        raise MalformedError(f"position {last} in a request of {blocks} blocks")
    return found


def _read(what: str, column: bytes, dtype: np.dtype[_Value], count: int) -> NDArray[_Value]:
    if len(column) != count * dtype.itemsize:
        raise MalformedError(f"{what} column of {len(column)} bytes where {count} values were due")
    return np.frombuffer(column, dtype)


class Outcomes:
    """State and reason of each block of a request. Mutable, not thread-safe."""

    __slots__ = ("note", "reasons", "states")
    __hash__ = None  # type: ignore[assignment]  # mutable

    def __init__(self, states: NDArray[np.uint8], reasons: NDArray[np.uint8], note: str = "") -> None:
        """Combine two columns of equal length.

        *states* holds numbers of ``BlockState`` or ``PutState``, *reasons* numbers of ``Reason``.
        """
        self.states = states
        self.reasons = reasons
        self.note = note
        """Message about the request as a whole; usually empty."""

    @classmethod
    def filled(cls, blocks: int, state: int, reason: int = Reason.NONE, note: str = "") -> Self:
        """Build the same outcome for each of *blocks* blocks."""
        return cls(filled(blocks, state), filled(blocks, reason), note)

    @classmethod
    def read(cls, states: bytes, reasons: bytes, blocks: int) -> Self:
        """Read the columns of a message; they are read-only.

        Raises MalformedError unless both have an entry for each of *blocks* blocks.
        """
        return cls(u8(states, blocks), u8(reasons, blocks))

    def __len__(self) -> int:
        """Count the blocks."""
        return len(self.states)

    def __eq__(self, other: object) -> bool:
        """Compare all blocks and the note."""
        if not isinstance(other, Outcomes):
            return NotImplemented
        return self.encode() == other.encode() and self.note == other.note

    def __repr__(self) -> str:
        """Show the columns."""
        return f"Outcomes({self.states.tolist()}, {self.reasons.tolist()}, {self.note!r})"

    def set(
        self, rows: Rows, state: int | NDArray[np.uint8], reason: int | NDArray[np.uint8] = Reason.NONE
    ) -> None:
        """Set the outcomes of some blocks: the same for all, or a value for each."""
        self.states[rows] = state
        self.reasons[rows] = reason

    def copy(self) -> Self:
        """Return an independent, writable copy."""
        return type(self)(self.states.copy(), self.reasons.copy(), self.note)

    def encode(self) -> tuple[bytes, bytes]:
        """Return the states and the reasons as columns of a message."""
        return self.states.tobytes(), self.reasons.tobytes()
