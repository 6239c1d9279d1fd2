"""Owners that answer late, or not at all: what nobody heard is neither written, nor said to be committed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.dpu_agent.shards.test_ownership import Clock
from tests.support.agent.assembly import (
    FAR_S,
    SETTINGS,
    Assembly,
    assembled,
    chain_of,
    get_states,
    put_states,
    reasons_of,
)

from ostraca_fabric.errors import ConnectError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.outcome import BlockState, PutState, Reason
from ostraca_fabric.wire.messages import (
    AgentRequest,
    AnswerToAgent,
    Commit,
    Committed,
    Lookup,
    Reserve,
    Resolve,
)

HOLD_S = SETTINGS.owner.hold_s


def between(
    fabric: Assembly, kind: type[AgentRequest], becomes: Callable[[AnswerToAgent], AnswerToAgent]
) -> None:
    """Let something become of the answers to requests of a kind, on their way."""
    ask = fabric.owners.ask
    fabric.ask_by_message()

    async def asked(agent: AgentId, request: AgentRequest) -> AnswerToAgent:
        answer = await ask(agent, request)
        return becomes(answer) if isinstance(request, kind) else answer

    fabric.owners.ask = asked  # type: ignore[method-assign]  # it comes between


def times_out(_: AnswerToAgent) -> AnswerToAgent:
    raise TimeoutError


def breaks(_: AnswerToAgent) -> AnswerToAgent:
    raise ConnectError("the connection broke")


def says_nothing(_: AnswerToAgent) -> AnswerToAgent:
    return Committed(0, ())


def says_no_reason(answer: AnswerToAgent) -> AnswerToAgent:
    assert isinstance(answer, Committed)
    (told,) = answer.shards
    return Committed(answer.request, (type(told)(told.shard, told.states[:-1], told.reasons),))


SILENT = pytest.mark.parametrize("silent", [times_out, breaks])


@pytest.mark.parametrize("too_late_s", [-5.0, 0.0])
async def test_space_ends_hold_s_after_it_was_asked_for_however_late_the_answer_comes(
    too_late_s: float,
) -> None:
    async with assembled() as fabric:
        await fabric.ready()
        fabric.context.clock = clock = Clock()

        def slow(answer: AnswerToAgent) -> AnswerToAgent:
            clock.stopped_s += HOLD_S + too_late_s
            return answer

        between(fabric, Reserve, slow)
        done = await fabric.put(fabric.worker(), [1], deadline_s=10 * HOLD_S)
        was_written = any((pieces.lengths > PAGE_BYTES).any() for pieces in fabric.drive.writes)
        if too_late_s < 0:
            assert (put_states(done), was_written) == ([PutState.COMMITTED], True)
        else:
            assert (put_states(done), reasons_of(done)) == ([PutState.DECLINED], [Reason.EXPIRED])
            assert not was_written
        await fabric.at_rest()


@pytest.mark.parametrize("silent", [times_out, breaks, says_nothing, says_no_reason])
async def test_a_commit_of_which_nothing_is_heard_is_neither_committed_nor_declined(
    silent: Callable[[AnswerToAgent], AnswerToAgent],
) -> None:
    async with assembled() as fabric:
        between(fabric, Commit, silent)
        done = await fabric.put(fabric.worker(), [1, 2])
        assert put_states(done) == [PutState.LATE] * 2
        assert reasons_of(done) == [Reason.NO_OWNER] * 2
        await fabric.at_rest()


@SILENT
async def test_space_of_which_nothing_is_heard_is_declined(
    silent: Callable[[AnswerToAgent], AnswerToAgent],
) -> None:
    async with assembled() as fabric:
        between(fabric, Reserve, silent)
        done = await fabric.put(fabric.worker(), [1, 2])
        assert put_states(done) == [PutState.DECLINED] * 2
        assert reasons_of(done) == [Reason.NO_OWNER] * 2


@SILENT
async def test_what_no_owner_answers_for_is_a_miss(silent: Callable[[AnswerToAgent], AnswerToAgent]) -> None:
    async with assembled() as fabric:
        worker = fabric.worker()
        assert put_states(await fabric.put(worker, [1])) == [PutState.COMMITTED]
        between(fabric, Resolve, silent)
        for pin_s in (0.0, 1.0):
            asked = Lookup(1, 0, FAR_S, chain_of([1, 2]), pin_s)
            found = await fabric.data_path.lookup(worker, fabric.volume, asked)
            assert list(found.states) == [BlockState.MISS] * 2
            assert list(found.reasons) == [Reason.NO_OWNER] * 2
        got = await fabric.get(worker, [1, 2])
        assert get_states(got) == [BlockState.MISS] * 2
        assert reasons_of(got) == [Reason.NO_OWNER] * 2
