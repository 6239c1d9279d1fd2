"""``ostraca`` without tag checks, to measure their cost.

Usage: ``python -m benchmarks.support.without_tag_checks up ...``, for D8 alone: no setting of the product
disables the checks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraca_fabric.drives.io_engine import IoEngine
from ostraca_fabric.tables import digests

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHECK = 3
"""Place of the check among the arguments of ``IoEngine.submit``."""


def all_good(memory: object, offsets: NDArray[np.int64], *_: Any, **__: Any) -> NDArray[np.bool_]:  # noqa: ANN401, ARG001
    """Report every block as good, without a check."""
    return np.ones(len(offsets), np.bool_)


_submit = IoEngine.submit


def submit_unchecked(engine: IoEngine, *batch: Any, **named: Any) -> bool:  # noqa: ANN401
    """Submit a batch as ``IoEngine.submit`` does, without a check of tags."""
    arguments = list(batch)
    arguments[_CHECK] = None
    return _submit(engine, *arguments, **named)


if __name__ == "__main__":
    setattr(IoEngine, "submit", submit_unchecked)  # noqa: B010 (a method)
    # Before anything imports the name from there.
    vars(digests)["are_good"] = all_good
    from ostraca_cli import main

    sys.exit(main())
