"""What the tests of connections share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sdk.connection.caller_host import CallerHost, host_of
from tests.sdk.scripted_agent import ScriptedAgent


@pytest.fixture
def host(agent: ScriptedAgent) -> Iterator[CallerHost]:
    with host_of(agent) as made:
        yield made
