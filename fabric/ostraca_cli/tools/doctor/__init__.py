"""``ostraca doctor``: content of drives, problems and remedies.

The command works offline, from the drives alone. The only write is ``--format``, which empties the named
shard. ``ostraca doctor drive`` checks whether drives are fit for an enclosure (``fitness``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.command import Command, number_argument, one_of, option
from ostraca_fabric.errors import DriveError, UsageError
from ostraca_fabric.runtime.os_errors import state_and_remedy

if TYPE_CHECKING:
    from ostraca_cli.tools.doctor.volumes import Row

_DRIVE = "drive"
_DUMPS = ("superblock", "volumes", "summary", "entries")


def _run(options: argparse.Namespace) -> int:
    from ostraca_cli.tools.doctor.drives import list_drives

    if options.paths[0] == _DRIVE and (options.paths[1:] or not Path(_DRIVE).exists()):
        return _fitness(options)
    if options.force:
        raise UsageError("--force goes with `ostraca doctor drive DEVICE`")
    options.paths = [Path(each) for each in options.paths]
    if options.segment is not None and options.dump not in ("summary", "entries"):
        raise UsageError("--segment goes with --dump summary or --dump entries")
    if options.format is not None:
        return _format(options)
    drives = list(dict.fromkeys(drive for path in options.paths for drive in list_drives(path)))
    return _dump(drives, options) if options.dump else _explain(drives, options)


def _fitness(options: argparse.Namespace) -> int:
    from ostraca_cli.tools.doctor.fitness import find_drives, fitness_facts, fitness_lines, is_good

    names = options.paths[1:]
    if not names or options.verify or options.dump or options.format or options.segment is not None:
        raise UsageError(
            "`ostraca doctor drive` takes NVMe drives, as /dev/nvme0n1, --json and --force; write a "
            "path named drive as ./drive"
        )
    drives = find_drives(names)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode([fitness_facts(each) for each in drives])).decode())
    else:
        print("\n\n".join("\n".join(fitness_lines(each)) for each in drives))
    return 0 if options.force or all(map(is_good, drives)) else 1


def _explain(drives: Sequence[Path], options: argparse.Namespace) -> int:
    from ostraca_cli.tools.doctor.examine import examine_drive
    from ostraca_cli.tools.doctor.findings import drive_lines, last_line

    found = []
    for drive in drives:
        finding = examine_drive(drive, is_verifying=options.verify)
        found.append(finding)
        if not options.json:
            print("\n".join(drive_lines(finding)) + "\n", flush=True)
    is_good = all(finding.is_good for finding in found)
    if options.json:
        import msgspec

        told = {"is_good": is_good, "drives": found}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        print(last_line(found))
    return 0 if is_good else 1


def _dump(drives: Sequence[Path], options: argparse.Namespace) -> int:
    import msgspec

    from ostraca_cli.tools.doctor.dump import row_text

    for drive in drives:
        if not options.json:
            print(f"{drive}:")
        for row in _rows(drive, options):
            print(
                msgspec.json.encode({"path": str(drive), **row}).decode()
                if options.json
                else f"  {row_text(row)}"
            )
    return 0


def _rows(drive: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield what a dump prints; raises DriveError. An error of the output is none of the drive."""
    from ostraca_cli.tools.doctor.dump import dump

    try:
        yield from dump(drive, options.dump, options.segment)
    except OSError as error:
        raise DriveError(f"{drive} can't be read: {state_and_remedy(error)[0]}") from error


def _format(options: argparse.Namespace) -> int:
    from ostraca_cli.tools.doctor.drives import list_drives
    from ostraca_cli.tools.doctor.format import format_shard

    if options.json or len(options.paths) != 1 or os.path.isdir(options.paths[0]):  # noqa: PTH112 (never raises)
        raise UsageError("--format takes a single drive, a file or a block device, and no other option")
    (drive,) = list_drives(options.paths[0])
    made = format_shard(drive, options.format)
    print(f"{drive}: shard {made.shard} is empty, formatted as {made.format_id.hex()}")
    return 0


COMMAND = Command(
    name="doctor",
    summary="explain the content of drives, problems and remedies",
    description=(
        "Read drives, also of a running fabric, and explain them: owner of each shard, fill level,\n"
        "damage, usability by `ostraca up`, and remedies. Only --format writes. "
        "`ostraca doctor drive DEVICE`\nreports fitness of an NVMe drive for an enclosure, and present "
        "users of the drive.\nExit codes: 0 no problems, 1 problems, 2 bad usage."
    ),
    example=(
        "  $ ostraca doctor /tmp/fabric\n  /tmp/fabric/enclosure-0/drive-0.img: 512.0 MiB\n    shard        "
        "enclosure-0/drive-0/0, at byte 0\n    ...\n    verdict      `ostraca up` can use the drive.\n\n  2 "
        "drives, no problems.\n"
    ),
    options=(
        option(
            "paths",
            nargs="+",
            metavar="PATH",
            help=(
                "a drive (file or block device), or a directory of drives, as the --dir of `ostraca up`; "
                "or the word `drive` and NVMe devices, to check their fitness for an enclosure"
            ),
        ),
        option("--json", action="store_true", help="print findings as JSON; with --dump, an object per line"),
        one_of(
            option(
                "--verify",
                action="store_true",
                help="also read all listed blocks and check their tags",
            ),
            option(
                "--dump", choices=_DUMPS, help="print the raw content, field by field, without explanations"
            ),
            option(
                "--format",
                metavar="SHARD",
                help=(
                    "EMPTY this shard of the drive PATH, or create the missing drive. Does not ask for "
                    "confirmation; refuses during a run of the fabric in the drive's directory"
                ),
            ),
        ),
        option("--segment", type=number_argument, metavar="N", help="dump only this segment"),
        option(
            "--force", action="store_true", help=("with `doctor drive`: exit code 0 even for an unfit drive")
        ),
    ),
    run=_run,
)
