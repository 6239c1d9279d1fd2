"""Futures whose waiters may have gone away."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_Result = TypeVar("_Result")


def resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    """Resolve a future, unless the waiter has cancelled it."""
    if not future.done():
        future.set_result(result)
