"""Messages accepted by each end, and refusal of all other bytes.

Unacceptable bytes always end in ProtocolError; no other exception leaves this module. A known message out of
place raises plain ProtocolError; anything else raises MalformedError.
"""

from __future__ import annotations

import typing
from typing import Any, Generic, TypeVar

import msgspec

from ostraca_fabric.errors import MalformedError, ProtocolError
from ostraca_fabric.wire.messages import (
    AgentAnswer,
    AgentRequest,
    AnswerToAgent,
    AnswerToOperator,
    AnyMessage,
    Cancel,
    Fetch,
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

FROM_WORKER: MessageDecoder[WorkerRequest | WorkerNotice | Cancel] = MessageDecoder(
    WorkerRequest | WorkerNotice | Cancel, sender="a worker"
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

TO_WORKER: MessageDecoder[AgentAnswer | GetProgress | Settled | Fetch | Leaving | Refused] = MessageDecoder(
    AgentAnswer | GetProgress | Settled | Fetch | Leaving | Refused, sender="a worker's agent"
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
