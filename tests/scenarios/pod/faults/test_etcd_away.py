"""What an agent says of an etcd that is away, or that answers and has lost the fabric. Real processes."""

from __future__ import annotations

import pytest
from tests.support.pod.processes import AgentProcess, Pod, until
from tests.support.pod.work import await_puts, declined, missing, put

from ostraca import Reason

pytestmark = pytest.mark.slow


def troubled(agent: AgentProcess) -> dict[str, str]:
    """Return what an agent's conditions that are untrue say."""
    look = agent.status()
    assert look is not None
    return {each.name: each.sentence for each in look.conditions if not each.is_true}


def test_an_outage_of_etcd_is_one_line_when_it_begins_and_one_when_it_ends(own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    agent = own.agent("agent-0")
    own.start()
    with agent.connect() as client:
        await_puts(client)
        before = len(agent.log.read_text().splitlines())
        own.etcd.kill()
        try:
            until(lambda: "map_current" in troubled(agent), "the watch is missed")
            until(lambda: "shards_writable" in troubled(agent), "the grant is over")
            assert set(declined(client, range(3000, 3024))) == {Reason.FENCED}
            said = troubled(agent)
            assert said["membership_answers"].startswith("The membership store does not answer")
            assert "etcd has not been heard for" in said["map_current"]
        finally:
            own.etcd.start()
        until(lambda: not troubled(agent).keys() & {"membership_answers", "map_current"}, "all is well")
        await_puts(client)
    begun, ended = agent.log.read_text().splitlines()[before:]
    assert "agent-0: the membership store does not answer: gets continue, puts" in begun
    assert "claims, grants, joins and new volumes wait" in begun
    assert "agent-0: the membership store answers again, after " in ended
    agent.stop()
    own.check_logs()


def test_an_etcd_that_has_lost_the_fabric_is_told_with_what_to_do_and_not_called_silent(own: Pod) -> None:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    agent = own.agent("agent-0")
    own.start()
    with agent.connect() as client:
        await_puts(client)
        assert put(client, range(4)) == list(range(4))
        before = len(agent.log.read_text())
        own.etcd.ctl("del", "--prefix", own.prefix)
        until(lambda: "membership_answers" in troubled(agent), "it is noticed")
        until(lambda: "shards_writable" in troubled(agent), "the grant is over")
        assert set(declined(client, range(3000, 3024))) == {Reason.FENCED}
        assert missing(client, range(4)) == [], "gets go on"
        look, said = agent.status(), troubled(agent)
        assert look is not None
        assert look.membership.silent_s == 0
        assert "etcd answers, and has lost fabric" in said["membership_answers"]
        assert "rebuild the fabric with `ostraca fabric rebuild --etcd`" in said["membership_answers"]
        assert "the membership store does not confirm the claim" in said["shards_writable"]
        logged = agent.log.read_text()[before:]
    assert len(logged.splitlines()) <= 4, logged
    assert not [
        words for words in ("silent", "does not answer", "has not answered", "begin") if words in logged
    ]
    agent.kill()
    own.check_logs()
