"""What holds for all histories and scenes of a fabric."""

from __future__ import annotations

import gc
import random
import secrets
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ids of agents' starts be the same in each run, as in histories.

    How long an agent waits before it joins again follows from them.
    """
    dice = random.Random(1)
    monkeypatch.setattr(secrets, "token_bytes", lambda nbytes=None: dice.randbytes(nbytes or 32))


@pytest.fixture(autouse=True)
def clear_up() -> Iterator[None]:
    """Have what dead processes waited for be gone.

    Asyncio says of it that nobody heard of it, and a history that is played next would take that for a
    bug of its own.
    """
    yield
    gc.collect()
