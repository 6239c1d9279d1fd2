"""The ``ostraca`` command: reads its arguments, runs one command, and says in one sentence what went wrong.

Exit codes: 0 fine, 1 failed, 2 bad usage, 3 refused as things are now, and nothing was changed (an enclosure
that is still being drained can't be retired), 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from ostraca.cli import bench, doctor, explain, fabric, metrics, replay, status, up
from ostraca.cli.admin import audit, enclosure, events, operation, settings, tenant, volume
from ostraca.cli.admin.errors import NotNowError
from ostraca.cli.logs import last_words
from ostraca.cli.serve import command as serve
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED = 1
BAD_USAGE = 2
NOT_NOW = 3
INTERRUPTED = 130

_COMMANDS = (
    up.COMMAND,
    serve.COMMAND,
    status.COMMAND,
    metrics.COMMAND,
    explain.COMMAND,
    doctor.COMMAND,
    fabric.COMMAND,
    enclosure.COMMAND,
    tenant.COMMAND,
    volume.COMMAND,
    settings.COMMAND,
    operation.COMMAND,
    audit.COMMAND,
    events.COMMAND,
    bench.COMMAND,
    replay.COMMAND,
)
_OF_THE_EXTRA = frozenset({"google", "grpc", "nixl", "nixl_cu12", "nixl_cu13", "rich", "uvicorn", "uvloop"})
"""Modules that come with an extra of the package, as with ``ostraca[agent]``."""

_EPILOG = """\
examples:
  ostraca up                    run a whole fabric on this machine
  ostraca fabric create --etcd HOST:PORT   begin a fabric that etcd keeps
  ostraca serve agent --etcd HOST:PORT     run this host's agent of it
  ostraca enclosure add NAME --controller rdma://HOST:4420 --watch     bring an enclosure into it
  ostraca volume switch TENANT/NAME off    serve a volume no more
  ostraca status                look at it, from another terminal
  ostraca metrics               its numbers, for Prometheus
  ostraca explain HASH --volume NAME   why is, or was, this block a miss?
  ostraca doctor DIR            are its drives in order?
  ostraca fabric rebuild --dir DIR     its record is lost: make it again from the drives
  ostraca bench --seconds 2     measure it beside this machine's own limits
  ostraca replay TRACE          how much flash and which write budget do these requests want?

"ostraca COMMAND --help" explains a command. Exit codes: 0 fine, 1 failed, 2 bad usage, 3 refused as
things are now, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that *argv* (default: the process's) asks for; return the exit code. Never raises."""
    # NumPy, which comes later, starts a thread for each core to multiply matrices with: there are none here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why, or has printed the help that was asked for
        return end.code if isinstance(end.code, int) else BAD_USAGE
    try:
        return _run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except NotNowError as error:
        return _say(options, error, NOT_NOW)
    except UsageError as error:
        return _say(options, error, BAD_USAGE)
    except (OstracaError, OSError) as error:
        return _say(options, error, FAILED)


def _run(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has enough, as `head` does. What is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        return _say(
            options,
            f"this command needs {missing}; install it with: pip install 'ostraca[{options.extra}]'",
            FAILED,
        )
    return code


def _say(options: argparse.Namespace, why: object, code: int) -> int:
    sys.stderr.write(f"{last_words(options, why)}\n")
    return code


class _Parser(argparse.ArgumentParser):
    """Refuses what it does not know by itself: argparse would leave that to the parser of ``ostraca``, whose
    usage says nothing of the command.
    """

    def parse_known_args(  # type: ignore[override]  # as argparse's own, whose overloads say no more
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Read arguments; exits where some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="ostraca",
        description="Ostraca: the flash of a GPU pod as one write-once namespace of KV-cache blocks.",
        epilog=_EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ostraca {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        added = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"example:\n{command.example}",
            formatter_class=raw,
            allow_abbrev=False,
        )
        command.add_options(added)
        added.set_defaults(run=command.run, extra=command.extra)
    return parser
