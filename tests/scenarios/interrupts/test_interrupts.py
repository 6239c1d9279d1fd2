"""Exceptions of signal handlers at random moments, and thousands of operations of which many end early."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.scenarios.interrupts.process import TRANSPORTS, tried

SECONDS = 5.0
OPERATIONS = 3_000


@pytest.fixture(autouse=True)
def _needs_nixl(request: pytest.FixtureRequest) -> None:
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("transport") == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_an_interrupt_at_any_moment_harms_no_later_operation(tmp_path: Path, transport: str) -> None:
    is_well, words = tried(tmp_path, transport=transport, seed=random.randrange(1 << 32), seconds=SECONDS)
    assert is_well, words


def test_operations_that_are_interrupted_refused_cancelled_or_late_leak_nothing(tmp_path: Path) -> None:
    is_well, words = tried(
        tmp_path, transport="inline", seed=random.randrange(1 << 32), operations=OPERATIONS
    )
    assert is_well, words
