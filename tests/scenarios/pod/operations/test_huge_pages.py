"""An agent on reserved huge pages: it serves from them, or says how many are missing."""

from __future__ import annotations

import pytest
from tests.support.huge_pages import HugePages
from tests.support.pod.processes import Pod
from tests.support.pod.work import missing, put_all

pytestmark = pytest.mark.slow

MEMORY = ("--set", "memory.huge_pages=true", "--set", "memory.reserve_bytes=32MiB")


def test_an_agent_serves_from_reserved_pages_and_gives_them_back(own: Pod, huge_pages: HugePages) -> None:
    huge_pages.reserve(20)
    own.create(enclosures=1)
    agent = own.agent("agent-0", *MEMORY)
    own.start()
    assert huge_pages.free == 4, "32 MiB of staging are 16 pages"
    with agent.connect() as client:
        put_all(client)
        assert missing(client) == []
    agent.stop()
    assert huge_pages.free == 20
    own.check_logs()


def test_an_agent_with_too_few_pages_says_how_many_are_missing(own: Pod, huge_pages: HugePages) -> None:
    huge_pages.reserve(15)
    own.create(enclosures=1)
    agent = own.agent("agent-0", *MEMORY)
    agent.launch()
    assert agent.ended() == 1
    said = agent.log.read_text()
    assert "an agent wants 16 huge pages of 2 MiB, and 15 are free: the pool of huge pages" in said
    assert "Traceback" not in said
