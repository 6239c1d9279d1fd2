"""What one asks of an agent for people rather than for an engine: its status, and the story of a block."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ostraca.ask import ask
from ostraca.core.checks import checked_chain, checked_seconds
from ostraca_fabric.errors import ProtocolError, UsageError
from ostraca_fabric.explain import BlockExplanation
from ostraca_fabric.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.messages import Explain, Explained, Status, StatusDone

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca.client import Client
    from ostraca.core.events import Answer
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.wire.messages import Message


def ask_status(client: Client, *, timeout_s: float) -> AgentStatus:
    """Return what the agent believes. Raises ConnectError when it does not answer in time."""
    answer = _answer(client, lambda request, _: Status(request), timeout_s)
    if not isinstance(answer, StatusDone):
        raise ProtocolError(f"{type(answer).__name__} is no answer to a Status")
    return read_body(answer.body, AgentStatus)


def ask_explanation(client: Client, volume: Volume, chain: Chain, *, timeout_s: float) -> BlockExplanation:
    """Return what is known of one block. Raises UsageError, RefusedError and ConnectError."""
    if len(checked_chain(chain, hash_bytes=volume.layout.hash_bytes)) != 1:
        raise UsageError(f"{len(chain)} blocks to explain: name one, as in chain[4:5]")
    spans = (chain.span(),)
    answer = _answer(client, lambda request, left_s: Explain(request, left_s, volume.name, spans), timeout_s)
    if not isinstance(answer, Explained):
        raise ProtocolError(f"{type(answer).__name__} is no answer to an Explain")
    return read_body(answer.body, BlockExplanation)


def _answer(client: Client, question: Callable[[int, float], Message], timeout_s: float) -> Answer:
    """Ask; *question* makes a message of a request id and the time that remains."""
    longest_s = client.settings.deadline_s_max
    until_s = time.monotonic() + checked_seconds("timeout_s", timeout_s, longest_s=longest_s)
    with client.running(), client.reach.taken_up(until_s) as session:
        return ask(
            session,
            lambda request: question(request, until_s - time.monotonic()),
            until_s=until_s,
        )
