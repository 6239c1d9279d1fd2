"""``make soak-flash``.

A fabric on real files is killed at random moments, again and again, and must lose no block that it called
committed.

A worker outlives the kills and knows what it was told. After each one flash is read without Ostraca's code,
then the fabric is started on the same directory. With --power-cut the files lie on an ext4 file system of
their own that loses what was not flushed. Ends with an error for a lost block, a wrong byte, a block found
that was never put, and a fabric that does not start.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.scenarios.soak.enough import ended_by_ctrl_c
from tests.scenarios.soak_flash.disk import MODES, why_no_power_cut
from tests.scenarios.soak_flash.run import Options, Soak

from ostraca_cli.terminal.units import size_argument

DEFAULT = Options(Path())
NOT_HERE = 77
"""The exit code of a run that this machine can't do; what test harnesses take for *skipped*."""


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(prog="soak-flash", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=DEFAULT.kills, help="how many outages (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of moments and operations (default: any)")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to make a directory for the files (default: /tmp)"
    )
    parser.add_argument(
        "--capacity",
        type=size_argument,
        default=DEFAULT.capacity_bytes,
        metavar="SIZE",
        help="flash of all drives (default: 242MiB)",
    )
    parser.add_argument("--drives", type=int, default=DEFAULT.drives, help="(default: %(default)s)")
    parser.add_argument(
        "--life",
        type=float,
        default=DEFAULT.life_s,
        metavar="SECONDS",
        help="the longest a fabric is used before it is ended (default: %(default)s)",
    )
    parser.add_argument(
        "--power-cut",
        choices=MODES,
        help="cut the power of the files' own file system instead, mounted so: journal loses all that came "
        "after the last flush; ordered loses first writes and keeps overwrites. Needs root and a loop device",
    )
    parser.add_argument(
        "--no-flush",
        action="store_true",
        help="cut the power of a fabric that does not flush its drives: only wrong bytes and a fabric that "
        "does not start are errors then",
    )
    options = parser.parse_args()
    if options.no_flush and options.power_cut is None:
        parser.error("--no-flush is for --power-cut: SIGKILL loses nothing that the kernel has")
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="ostraca-soak-flash-", dir=options.directory)).resolve()
    if options.power_cut is not None:
        why_not = why_no_power_cut(directory)
        if why_not is not None:
            directory.rmdir()
            print(f"skipped: no power can be cut on this machine: {why_not}")
            return NOT_HERE
    code = run(
        Options(
            directory=directory,
            kills=options.kills,
            seed=seed,
            capacity_bytes=options.capacity,
            drives=options.drives,
            life_s=options.life,
            power_cut=options.power_cut,
            flushes=not options.no_flush,
            is_strict=not options.no_flush,
        )
    )
    if code:
        print(f"what is left lies in {directory}")
    else:
        shutil.rmtree(directory)
    return code


def run(options: Options) -> int:
    """Run it with its words on the terminal; return the exit code."""
    how = f"power cuts of ext4 ({options.power_cut})" if options.power_cut else "kills by SIGKILL"
    print(f"soak-flash: {options.kills} {how}, --seed {options.seed}", flush=True)
    with Soak(options) as soak:
        with ended_by_ctrl_c(soak):
            soak.run()
        print(soak.summary())
        violations = soak.ledger.violations
    for violation in violations:
        print(f"VIOLATION: {violation}")
    print("nothing was wrong" if not violations else f"{len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
