"""Print the modules on the path of a get, one path per line. Exits with code 77 where no get can run."""

from __future__ import annotations

import sys

from scripts.structure.config import CODE
from scripts.structure.get_path.fabric import get_path, missing_tools
from scripts.structure.measures import CANNOT_RUN
from scripts.structure.sources import ROOT, tracked_paths


def main() -> int:
    """Measure; return the exit code."""
    if lacking := missing_tools():
        print(lacking, file=sys.stderr)
        return CANNOT_RUN
    modules = [ROOT / path for path in tracked_paths(*CODE) if path.suffix == ".py"]
    for module in sorted(get_path(modules)):
        print(module.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
