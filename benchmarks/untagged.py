"""``ostraca`` that checks no tag, to measure what checking costs: ``python -m benchmarks.untagged up ...``.

For D8 alone. Nothing in the product can be told not to check.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraca_fabric import tags

if TYPE_CHECKING:
    from numpy.typing import NDArray


def all_good(memory: object, offsets: NDArray[np.int64], *_: Any) -> NDArray[np.bool_]:  # noqa: ANN401, ARG001
    """Say that every block is good, and look at none."""
    return np.ones(len(offsets), np.bool_)


if __name__ == "__main__":
    # Before anything imports the name from there.
    vars(tags)["are_good"] = all_good
    from ostraca.cli import main

    sys.exit(main())
