"""What is said of a block in one sentence."""

from __future__ import annotations

import pytest

from ostraca_fabric.telemetry.explain import BlockEvent, BlockExplanation, OwnerView, verdict

FENCED = "the owner had lost its claim, or could not confirm the claim"
STALE_MAP = "the writing agent had missed two changes of placement"


def event(kind: str, reason: str, *, agent: str, label: str = "w/1") -> BlockEvent:
    return BlockEvent(agent, 3.0, label, kind, "DECLINED" if reason else "STAGED", reason)


def said(*events: BlockEvent, owner: str = "b") -> str:
    view = OwnerView(owner, is_owner=True, events=(), events_reach_s=60.0)
    return verdict(BlockExplanation("a", "e", "e/d/0", owner, False, view, events, 60.0))


@pytest.mark.parametrize(("reason", "meaning"), [("FENCED", FENCED), ("STALE_MAP", STALE_MAP)])
def test_a_put_that_was_declined_for_what_an_owner_may_not_says_so_and_who_owned_the_shard_then(
    reason: str, meaning: str
) -> None:
    reserved, put = event("RESERVED", reason, agent="a"), event("PUT", reason, agent="a")
    told = f"It can't be got: a put of it 3 s ago ended DECLINED for {reason}: {meaning}"
    assert said(reserved, put) == f"{told}; a owned the shard then."
    assert said(reserved, put, owner="a") == f"{told}."


def test_who_owned_the_shard_is_not_guessed_from_what_another_request_met() -> None:
    others = event("RESERVED", "", agent="a", label="w/0")
    assert said(others, event("PUT", "FENCED", agent="a")).endswith(f"for FENCED: {FENCED}.")


def test_a_commit_tells_by_itself_who_owned_the_shard() -> None:
    told = said(event("COMMITTED", "EXPIRED", agent="a", label=""))
    assert told == "It can't be got: its commit 3 s ago ended DECLINED for EXPIRED; a owned the shard then."
