"""Health pages of the admin service: questions to etcd, and answers while the service is busy or starts."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse

from ostraca_admin.api.probes import FRESH_S, ProbedApp, Readiness
from ostraca_fabric.connection.network import listen, real_address
from ostraca_fabric.errors import StoreAwayError
from ostraca_fabric.telemetry.http.app import HttpPage
from ostraca_fabric.telemetry.http.server import LoopServer
from ostraca_fabric.wire.address import TcpAddress

CONNECTIONS_MAX = 3


class Etcd:
    """Answers to the question of a check, and the clock of the checks."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.asked = 0
        self.answers = asyncio.Event()
        self.trouble = ""

    async def ask(self) -> None:
        self.asked += 1
        await self.answers.wait()
        if self.trouble:
            raise StoreAwayError(self.trouble)

    def readiness(self, answer_s: float = 30.0) -> Readiness:
        readiness = Readiness(lambda: self.now_s, answer_s=answer_s)
        readiness.ask = self.ask
        return readiness


def ready(page: HttpPage) -> tuple[int, bool, str]:
    body = json.loads(page.body)
    (condition,) = body["conditions"]
    assert condition["name"] == "ready"
    assert condition["is_true"] == body["is_ready"]
    return page.code, body["is_ready"], condition["sentence"]


async def test_concurrent_requests_share_a_check_and_a_second_shares_its_answer() -> None:
    etcd = Etcd()
    readiness = etcd.readiness()
    pages = [asyncio.ensure_future(readiness.page()) for _ in range(20)]
    await asyncio.sleep(0)
    etcd.now_s += 10 * FRESH_S  # a check that takes long is not repeated
    etcd.answers.set()
    assert {ready(await page) for page in pages} == {(200, True, "Ready: etcd answers.")}
    assert etcd.asked == 1
    etcd.now_s += FRESH_S
    etcd.trouble = "etcd is away"
    assert ready(await readiness.page()) == (503, False, "Not ready: etcd is away.")
    etcd.trouble = ""
    etcd.now_s += 0.9 * FRESH_S
    assert ready(await readiness.page())[0] == 503
    assert etcd.asked == 2
    etcd.now_s += 0.2 * FRESH_S
    assert ready(await readiness.page())[0] == 200


async def test_a_silent_etcd_is_given_up_in_time() -> None:
    readiness = Etcd().readiness(answer_s=0.05)
    page = await asyncio.wait_for(readiness.page(), 10)
    assert ready(page) == (503, False, "Not ready: etcd has not answered for 0.05 s.")


async def test_a_starting_service_lives_and_is_not_ready() -> None:
    readiness = Readiness(lambda: 0.0)
    readiness.wait = "connection refused"
    async with served(readiness) as (url, front):
        assert await asyncio.to_thread(asked, url, "/healthz") == (200, "ok\n")
        code, body = await asyncio.to_thread(asked, url, "/readyz")
        assert code == 503
        sentence = json.loads(body)["conditions"][0]["sentence"]
        assert sentence == "Not ready: starting. Waiting for etcd, to find the fabric: connection refused."
        code, body = await asyncio.to_thread(asked, url, "/v1/map")
        assert (code, json.loads(body)["detail"]) == (
            503,
            "the service waits for etcd and the fabric: see /readyz",
        )
        front.app = PlainTextResponse("the API")
        assert await asyncio.to_thread(asked, url, "/v1/map") == (200, "the API")


async def test_a_busy_service_answers_its_probes_and_refuses_others() -> None:
    etcd = Etcd()
    etcd.answers.set()
    async with served(etcd.readiness()) as (url, front):
        front.app = PlainTextResponse("the API")

        def check() -> None:
            with held(url, CONNECTIONS_MAX - 1):
                assert asked(url, "/v1/map") == (200, "the API")
            with held(url, CONNECTIONS_MAX):
                code, body = asked(url, "/v1/map")
                assert (code, "limits.connections_max" in body) == (503, True)
                assert asked(url, "/healthz") == (200, "ok\n")
                assert asked(url, "/readyz")[0] == 200

        await asyncio.to_thread(check)


@asynccontextmanager
async def served(readiness: Readiness) -> AsyncIterator[tuple[str, ProbedApp]]:
    """Serve the pages as the daemon does."""
    front = ProbedApp(readiness, connections=lambda: server.connections, connections_max=CONNECTIONS_MAX)
    server = LoopServer(front, head_bytes_max=4096, grace_s=1, certificate=None)  # type: ignore[arg-type]  # starlette's names of ASGI types
    place = TcpAddress("127.0.0.1", 0)
    listening = listen(place)
    url = str(real_address(place, listening)).replace("tcp", "http", 1)
    serving = asyncio.ensure_future(server.run(listening))
    try:
        yield url, front
    finally:
        await server.stop()
        await serving


@contextmanager
def held(url: str, count: int) -> Iterator[None]:
    """Hold connections, each with an answered request."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(_place(url), timeout=10))
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        yield


def asked(url: str, path: str) -> tuple[int, str]:
    host, port = _place(url)
    with closing(http.client.HTTPConnection(host, port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def _place(url: str) -> tuple[str, int]:
    found = urlsplit(url)
    assert found.hostname is not None
    assert found.port is not None
    return found.hostname, found.port
