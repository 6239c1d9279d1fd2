"""``python -m scripts.structure``: print each measure with its goal; below the table, list offenders."""

from __future__ import annotations

import argparse
import sys

from scripts.structure.measures import get_path_row, static_rows
from scripts.structure.table import is_met, offender_lines, table_lines

OFFENDERS = 10


def main() -> int:
    """Print the report; return 1 if ``--check`` finds a missed goal."""
    parser = argparse.ArgumentParser(prog="python -m scripts.structure", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a goal is missed")
    parser.add_argument(
        "--offenders", type=int, default=OFFENDERS, help="lines per measure (default: %(default)s)"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--static", action="store_true", help="start no processes: skip the path of a get")
    part.add_argument("--get-path", action="store_true", help="measure the path of a get only")
    options = parser.parse_args()
    rows = [
        *([] if options.get_path else static_rows()),
        *([] if options.static else [get_path_row()]),
    ]
    print("\n".join([*table_lines(rows), *offender_lines(rows, most=options.offenders)]))
    return int(options.check and not is_met(rows))


if __name__ == "__main__":
    sys.exit(main())
