"""What runs on virtual time says so: its loop is a ``VirtualLoop``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from tests.support.simulated.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    wanted = getattr(getattr(item, "cls", None), "loop_factories", None)
    return wanted or {"asyncio": asyncio.new_event_loop}


VIRTUAL = {"virtual": VirtualLoop}
