"""``make soak-sim``: many histories of a whole fabric: agents, workers, enclosures and the store."""

from __future__ import annotations

import sys

from tests.simulation.campaign import campaign
from tests.simulation.fabric.history.history import STEPS
from tests.simulation.fabric.history.many import played

if __name__ == "__main__":
    sys.exit(campaign("tests.simulation.fabric", __doc__, played, histories=10_000, steps=STEPS))
