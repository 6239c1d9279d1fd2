"""``python -m benchmarks.peers``; see the package."""

import sys

from benchmarks.peers.program import main

if __name__ == "__main__":
    sys.exit(main())
