"""What an agent says of itself between its start and its end."""

from __future__ import annotations

import msgspec
from tests.fabric.telemetry.metrics_samples import STATUS

from ostraca_dpu_agent.lifecycle import Lifecycle
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.telemetry.status import AgentStatus, MembershipStatus


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def initial_status(life: Lifecycle) -> AgentStatus:
    return life.initial_status(AgentId("agent-0"), AgentSettings())


def condition(status: AgentStatus, name: str) -> tuple[bool, float, str]:
    (found,) = (each for each in status.conditions if each.name == name)
    return found.is_true, found.since_s, found.sentence


def test_an_agent_that_waits_for_the_store_says_for_how_long_and_that_it_has_no_map() -> None:
    clock = Clock()
    life = Lifecycle(clock)
    initial_status(life)
    clock.now_s += 2.0
    life.wait_for_store("etcd is down", asked_s=100.0)
    initial_status(life)
    clock.now_s += 6.0
    status = initial_status(life)
    assert status.membership == MembershipStatus(8.0, "etcd is down", has_map=False)
    assert condition(status, "membership_answers") == (
        False,
        6.0,
        "The membership store does not answer, and the agent has no map: etcd is down.",
    )
    assert condition(status, "map_current") == (False, 8.0, "The agent has no map yet and serves nothing.")


def test_a_store_that_has_answered_is_waited_for_no_more() -> None:
    life = Lifecycle(Clock())
    life.wait_for_store("etcd is down", asked_s=99.0)
    life.wait_for_store("", asked_s=99.0)
    assert initial_status(life).membership == MembershipStatus(has_map=False)


def test_an_agent_that_is_made_and_waits_to_be_announced_says_that_the_store_is_silent() -> None:
    clock = Clock()
    life = Lifecycle(clock)
    life.wait_for_store("etcd is down", asked_s=clock() - 3.0)
    status = life.with_conditions(msgspec.structs.replace(STATUS, membership=MembershipStatus()))
    assert status.membership == MembershipStatus(3.0, "etcd is down")
    assert condition(status, "map_current")[0]
