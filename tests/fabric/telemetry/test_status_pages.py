"""The pages of a daemon, and what they cost its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.fabric.telemetry.metrics_samples import STATUS

from ostraca_fabric.telemetry.conditions import READY, Condition
from ostraca_fabric.telemetry.http.app import HttpPage, HttpSettings
from ostraca_fabric.telemetry.http.status_pages import StatusPages, process_routes
from ostraca_fabric.telemetry.metrics import AGENT_METRICS
from ostraca_fabric.telemetry.openmetrics import CONTENT_TYPE, render
from ostraca_fabric.telemetry.status import AgentStatus

Pages = dict[str, Callable[[], Awaitable[HttpPage]]]


class Asked:
    """An agent that counts how often it is asked, and a clock."""

    def __init__(self, status: AgentStatus = STATUS) -> None:
        self.status = status
        self.times = 0
        self.now_s = 100.0

    def __call__(self) -> AgentStatus:
        self.times += 1
        return msgspec.structs.replace(self.status, uptime_s=float(self.times))

    def pages(self, loop: asyncio.AbstractEventLoop | None = None, answer_s: float = 5.0) -> Pages:
        settings = HttpSettings(fresh_s=1.0, answer_s=answer_s)
        return StatusPages(
            "the agent",
            self,
            AGENT_METRICS,
            settings,
            lambda: self.now_s,
            loop=loop or asyncio.get_running_loop(),
        ).routes()


async def test_however_often_pages_are_asked_for_the_agent_is_asked_once_in_a_while() -> None:
    agent = Asked()
    pages = agent.pages()
    for _ in range(20):
        await asyncio.gather(pages["/metrics"](), pages["/readyz"](), pages["/status"](), pages["/healthz"]())
    assert agent.times == 1
    first = await pages["/metrics"]()
    agent.now_s += 1.0
    second = await pages["/metrics"]()
    assert agent.times == 2
    assert first != second


async def test_metrics_are_the_text_of_the_status() -> None:
    agent = Asked()
    text = render(AGENT_METRICS, msgspec.structs.replace(STATUS, uptime_s=1.0))
    assert await agent.pages()["/metrics"]() == HttpPage(text.encode(), CONTENT_TYPE)


async def test_the_status_reads_back() -> None:
    page = await Asked().pages()["/status"]()
    assert msgspec.json.decode(page.body, type=AgentStatus) == msgspec.structs.replace(STATUS, uptime_s=1.0)


@pytest.mark.parametrize(("is_true", "code"), [(True, 200), (False, 503)])
async def test_readiness_is_that_of_the_agent_and_comes_with_all_conditions(is_true: bool, code: int) -> None:
    conditions = (Condition(READY, is_true, 1.0, "so"), Condition("drives_good", False, 2.0, "one is not"))
    page = await Asked(msgspec.structs.replace(STATUS, conditions=conditions)).pages()["/readyz"]()
    assert page.code == code
    assert msgspec.json.decode(page.body) == {
        "is_ready": is_true,
        "conditions": [
            {"name": READY, "is_true": is_true, "since_s": 1.0, "sentence": "so"},
            {"name": "drives_good", "is_true": False, "since_s": 2.0, "sentence": "one is not"},
        ],
    }


async def test_a_loop_that_does_not_answer_is_unhealthy_and_nobody_waits_long_for_it() -> None:
    agent = Asked()
    blocked = asyncio.new_event_loop()  # nobody runs it
    pages = agent.pages(blocked, answer_s=0.01)
    found = await asyncio.gather(
        pages["/healthz"](), pages["/readyz"](), pages["/metrics"](), pages["/status"]()
    )
    assert [page.code for page in found] == [503] * 4
    assert b"its loop is blocked" in found[0].body
    blocked.call_soon(blocked.stop)
    await asyncio.to_thread(blocked.run_forever)  # it goes on
    assert (await pages["/healthz"]()).code == 200
    assert agent.times == 1, "all who waited had asked the same"
    blocked.close()


async def test_several_agents_of_a_process_have_paths_of_their_own() -> None:
    one, two = Asked().pages(), Asked().pages()
    assert list(process_routes({"agent-0": one})) == ["/metrics", "/healthz", "/readyz", "/status"]
    assert list(process_routes({"agent-0": one, "agent-1": two})) == [
        f"/agents/agent-{number}{path}"
        for number in range(2)
        for path in ("/metrics", "/healthz", "/readyz", "/status")
    ]
