"""Workers whose blocks cross by NIXL, from agents that are processes of their own on their host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.pod.processes import Pod, until
from tests.pod.work import CHAINS, SMALL, await_puts, missing, put

import ostraca

pytestmark = [pytest.mark.slow, pytest.mark.nixl]

NIXL = replace(SMALL, transports=("nixl",))
"""And by nothing else: a worker that can't have NIXL is not connected."""


def await_whole(client: ostraca.Client) -> None:
    until(lambda: not missing(client, deadline_s=0.5), "every block can be got again")


def test_blocks_of_an_agent_that_was_killed_are_got_by_nixl_from_its_successor(own: Pod) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    own.create()
    dying, other = (own.agent(f"agent-{number}", transport="nixl") for number in range(2))
    own.start()
    with (
        ostraca.connect([dying.address, other.address], settings=NIXL) as bereft,
        ostraca.connect(other.address, settings=NIXL) as near,
        ThreadPoolExecutor(1) as threads,
    ):
        assert put(bereft) == list(CHAINS)
        assert missing(near) == []
        getting = threads.submit(missing, bereft)
        dying.kill()
        getting.result()  # some of it was on its way, and no byte of it may be wrong
        for client in (near, bereft):
            await_whole(client)
            await_puts(client)
        dying.launch()
        dying.await_ready()
        own.await_settled()
        assert missing(near) == []
        assert missing(bereft) == []
        until(lambda: not bereft.quarantined_bytes, "what was on its way is known to have ended")
    own.check_logs()
