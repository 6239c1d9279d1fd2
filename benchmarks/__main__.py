"""``python -m benchmarks``; see the package."""

import sys

if __name__ == "__main__":
    # Here, because processes that are spawned import this module again and need none of it.
    from benchmarks.program import main

    sys.exit(main())
