"""``python -m tests.scenarios.interrupts``.

Interrupt operations of workers at random moments, over each transport.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.scenarios.interrupts.process import TRANSPORTS, tried


def main() -> int:
    """Do a trial for each transport; the exit code tells whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.interrupts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each trial takes")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    is_well = True
    for transport in TRANSPORTS:
        with tempfile.TemporaryDirectory() as directory:
            ended, words = tried(
                Path(directory), transport=transport, seed=options.seed, seconds=options.seconds
            )
        print(f"{transport}: {words}", flush=True)
        is_well = is_well and ended
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
