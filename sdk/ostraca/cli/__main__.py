"""``python -m ostraca.cli`` is the ``ostraca`` command."""

import sys

from ostraca.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
