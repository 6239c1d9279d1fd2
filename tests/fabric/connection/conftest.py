"""Connections are tested on asyncio's own loop and on uvloop; an agent may run on either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from tests.fabric.connection.peers import HANDSHAKE, SETTINGS, Answering, Dial

from ostraca_fabric.connection import Server, serve


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def handler() -> Answering:
    return Answering()


@pytest.fixture
async def server(tmp_path: Path, handler: Answering) -> AsyncIterator[Server]:
    server = await serve(f"unix://{tmp_path}/agent.sock", handler, HANDSHAKE, SETTINGS)
    yield server
    assert await server.close()


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    dial = Dial()
    yield dial
    await dial.close()
