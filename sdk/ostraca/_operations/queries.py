"""Queries: questions to the agent, and hints, beside the operations on blocks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ostraca._connection.rpc import ask
from ostraca._protocol.operations import blocks_per_request, windows
from ostraca._protocol.specs import check_batch, checked_chain, checked_chains, checked_seconds
from ostraca_fabric.errors import ProtocolError, RefusedError, UsageError
from ostraca_fabric.telemetry.explain import BlockExplanation
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.codec import read_body
from ostraca_fabric.wire.messages import EndSession, Explain, Explained, StatusDone, StatusRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ostraca._operations.runner import JobRunner
    from ostraca._protocol.events import Answer
    from ostraca._protocol.specs import VolumeSpec
    from ostraca_fabric.model.chain import Chain
    from ostraca_fabric.wire.messages import Message


def open_volume(runner: JobRunner, volume: VolumeSpec, *, timeout_s: float) -> None:
    """Open a volume on the live session.

    Raises UsageError, RefusedError and ConnectError.
    """
    until_s = _until_s(runner, timeout_s)
    connections = runner.runtime.connections

    def act() -> None:
        with connections.borrow_session(until_s) as session:
            connections.open_volume(session, volume, until_s)

    try:
        runner.run_in_thread(act)
    except RefusedError as error:
        if error.code == "usage":
            raise UsageError(str(error)) from error
        raise


def query_status(runner: JobRunner, *, timeout_s: float) -> AgentStatus:
    """Return the agent's status.

    Raises ConnectError if no answer arrives in time.
    """
    answer = _query(runner, lambda request, _: StatusRequest(request), timeout_s)
    if not isinstance(answer, StatusDone):
        raise ProtocolError(f"{type(answer).__name__} is no answer to a Status")
    return read_body(answer.body, AgentStatus)


def query_explanation(
    runner: JobRunner, volume: VolumeSpec, chain: Chain, *, timeout_s: float
) -> BlockExplanation:
    """Return the explanation of one block.

    Raises UsageError, RefusedError and ConnectError.
    """
    if len(checked_chain(chain, hash_bytes=volume.hash_bytes)) != 1:
        raise UsageError(f"{len(chain)} blocks to explain: name a single block, as in chain[4:5]")
    name, spans = volume.record.name, (chain.span(),)
    answer = _query(runner, lambda request, left_s: Explain(request, left_s, name, spans), timeout_s)
    if not isinstance(answer, Explained):
        raise ProtocolError(f"{type(answer).__name__} is no answer to an Explain")
    return read_body(answer.body, BlockExplanation)


def send_session_end(runner: JobRunner, volume: VolumeSpec, chains: Chain | Sequence[Chain]) -> None:
    """Send the hint of ``Volume.end_session``, which has no answer. Never blocks.

    Raises UsageError and ClosedError.
    """
    listed = checked_chains(chains, hash_bytes=volume.hash_bytes)
    check_batch(sum(map(len, listed)), blocks_max=volume.settings.batch_blocks_max)
    connections = runner.runtime.connections

    def act() -> None:
        session = connections.live
        handle = None if session is None else session.handles.get(volume.key)
        if session is None or handle is None:
            return
        for window in windows(listed, blocks_per_request(session.limits, volume.hash_bytes)):
            session.send(EndSession(handle, tuple(chain.span() for chain in window.chains)))

    runner.post(act)


def _query(runner: JobRunner, question: Callable[[int, float], Message], timeout_s: float) -> Answer:
    """Ask the agent; *question* builds the message from a request id and the remaining time."""
    until_s = _until_s(runner, timeout_s)
    connections = runner.runtime.connections

    def act() -> Answer:
        with connections.borrow_session(until_s) as session:
            return ask(
                session, lambda request: question(request, until_s - time.monotonic()), until_s=until_s
            )

    return runner.run_in_thread(act)


def _until_s(runner: JobRunner, timeout_s: float) -> float:
    longest_s = runner.runtime.settings.deadline_s_max
    return time.monotonic() + checked_seconds("timeout_s", timeout_s, longest_s=longest_s)
