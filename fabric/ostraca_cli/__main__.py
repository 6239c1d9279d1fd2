"""Run the ``ostraca`` command by ``python -m ostraca_cli``."""

import sys

from ostraca_cli import main

if __name__ == "__main__":
    sys.exit(main())
