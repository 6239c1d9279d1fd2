"""``ostraca doctor``: what lies on drives, what is wrong with it, and what to do.

Works offline, from the drives alone. Never writes, unless ``--format`` names the shard that is to be emptied.
``ostraca doctor drive`` looks at the drives themselves (``fitness``): whether they are fit for an enclosure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.command import Command
from ostraca_fabric.errors import DriveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_DRIVE = "drive"
_DUMPS = ("superblock", "volumes", "summary", "entries")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a drive (a file or a block device), or a directory of drives, as the --dir of `ostraca up`; or "
        "the word `drive`, and behind it NVMe drives, to say whether they are fit for an enclosure",
    )
    parser.add_argument(
        "--json", action="store_true", help="print what was found as JSON; of --dump, by line"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--verify",
        action="store_true",
        help="also read every listed block and check its tag",
    )
    action.add_argument(
        "--dump", choices=_DUMPS, help="print what lies there, field by field, instead of explaining it"
    )
    action.add_argument(
        "--format",
        metavar="SHARD",
        help="EMPTY this shard of the one drive that PATH names. Asks no further question; refuses while a "
        "fabric runs in the drive's directory",
    )
    parser.add_argument("--segment", type=_segment, metavar="N", help="dump this segment alone")
    parser.add_argument(
        "--force", action="store_true", help="of `doctor drive`: no trouble, though a drive is not fit"
    )


def _segment(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no segment: count from 0")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    from ostraca.cli.doctor.drives import drives_of

    if options.paths[0] == _DRIVE and (options.paths[1:] or not Path(_DRIVE).exists()):
        return _fitness(options)
    if options.force:
        raise UsageError("--force goes with `ostraca doctor drive DEVICE`")
    options.paths = [Path(each) for each in options.paths]
    if options.segment is not None and options.dump not in ("summary", "entries"):
        raise UsageError("--segment goes with --dump summary or --dump entries")
    if options.format is not None:
        return _format(options)
    drives = list(dict.fromkeys(drive for path in options.paths for drive in drives_of(path)))
    if options.dump:
        return _dump(drives, options)
    return _explain(drives, options)


def _fitness(options: argparse.Namespace) -> int:
    from ostraca.cli.doctor.fitness import fitness_lines, fitness_told, is_good, look_at

    names = options.paths[1:]
    if not names or options.verify or options.dump or options.format or options.segment is not None:
        raise UsageError(
            "`ostraca doctor drive` takes NVMe drives, as /dev/nvme0n1, --json and --force; a path that is "
            "called drive is written ./drive"
        )
    drives = look_at(names)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode([fitness_told(each) for each in drives])).decode())
    else:
        print("\n\n".join("\n".join(fitness_lines(each)) for each in drives))
    return 0 if options.force or all(map(is_good, drives)) else 1


def _explain(drives: Sequence[Path], options: argparse.Namespace) -> int:
    from ostraca.cli.doctor.examine import examine_drive
    from ostraca.cli.doctor.report import drive_lines, last_line

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

    from ostraca.cli.doctor.dump import dump, row_text

    for drive in drives:
        if not options.json:
            print(f"{drive}:")
        try:
            for row in dump(drive, options.dump, options.segment):
                print(
                    msgspec.json.encode({"path": str(drive), **row}).decode()
                    if options.json
                    else f"  {row_text(row)}"
                )
        except OSError as error:
            raise DriveError(f"{drive} can't be read: {error.strerror}") from error
    return 0


def _format(options: argparse.Namespace) -> int:
    from ostraca.cli.doctor.anew import format_shard
    from ostraca.cli.doctor.drives import drives_of

    if options.json or len(options.paths) != 1 or options.paths[0].is_dir():
        raise UsageError("--format takes one drive, a file or a block device, and no other option")
    (drive,) = drives_of(options.paths[0])
    made = format_shard(drive, options.format)
    print(f"{drive}: shard {made.shard} is empty, formatted as {made.format_id.hex()}")
    return 0


COMMAND = Command(
    name="doctor",
    summary="explain what lies on drives, what is wrong, and what to do",
    description=(
        "Read drives, of a fabric that runs or not, and explain them: whose shards they are, how full,\n"
        "what is damaged, whether `ostraca up` can use them, and if not, what to do. Nothing is written,\n"
        "but with --format. `ostraca doctor drive DEVICE` says whether an NVMe drive is fit for an\n"
        "enclosure, and who uses it. Exit codes: 0 no trouble, 1 trouble, 2 bad usage."
    ),
    example=(
        "  $ ostraca doctor /tmp/fabric\n"
        "  /tmp/fabric/enclosure-0/drive-0.img: 512.0 MiB\n"
        "    shard        enclosure-0/drive-0/0, at byte 0\n"
        "    ...\n"
        "    verdict      `ostraca up` can use it.\n"
        "\n"
        "  2 drives, no trouble.\n"
    ),
    add_options=_add_options,
    run=_run,
)
