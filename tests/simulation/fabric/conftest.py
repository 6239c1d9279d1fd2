"""What holds for all histories and scenes of a fabric."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def clear_up() -> Iterator[None]:
    """Have what dead processes waited for be gone: asyncio says of it that nobody heard of it, and a history
    that is played next would take that for a bug of its own.
    """
    yield
    gc.collect()
