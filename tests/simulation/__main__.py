"""``make simulate``: many histories of a shard's owners on a simulated drive."""

from __future__ import annotations

import sys

from tests.simulation.campaign import campaign
from tests.simulation.shard.history import STEPS
from tests.simulation.shard.many import played

if __name__ == "__main__":
    sys.exit(campaign("tests.simulation", __doc__, played, histories=10_000, steps=STEPS))
