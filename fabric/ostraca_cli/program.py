"""Entry point of ``ostraca``: parse arguments, run a command, report errors.

An error is reported in a sentence. Exit codes: 0 success, 1 failure, 2 bad usage, 130 interrupted (Ctrl-C).
Exit code 3 is a refusal due to the present state, without any change: for example, retiring an enclosure
during its drain.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from ostraca_cli.command import add_options
from ostraca_cli.commands import explain, fabric, metrics, status, up
from ostraca_cli.commands.admin import audit, enclosure, events, operation, settings, tenant, volume
from ostraca_cli.commands.admin.errors import StateConflictError
from ostraca_cli.commands.serve import command as serve
from ostraca_cli.composition.process_limits import error_text
from ostraca_cli.terminal.logs import final_error_line
from ostraca_cli.terminal.streams import flush_output
from ostraca_cli.tools import bench, doctor, replay
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.runtime.version import VERSION

FAILED = 1
BAD_USAGE = 2
STATE_CONFLICT = 3
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
"""Modules installed by an extra of the package, as by ``ostraca[agent]``."""

_EPILOG = """\
examples:
  ostraca up                    run a whole fabric on this machine
  ostraca fabric create --etcd HOST:PORT   create a fabric in etcd
  ostraca serve agent --etcd HOST:PORT     run this host's agent
  ostraca enclosure add NAME --controller rdma://HOST:4420 --watch     onboard an enclosure
  ostraca volume switch TENANT/NAME off    stop serving a volume
  ostraca status                show the state of the fabric
  ostraca metrics               print metrics for Prometheus
  ostraca explain HASH --volume NAME   explain hits and misses of a block
  ostraca doctor DIR            check the drives
  ostraca fabric rebuild --dir DIR     rebuild a lost record from the drives
  ostraca bench --seconds 2     measure a fabric beside the limits of this machine
  ostraca replay TRACE          size flash and write budget for a trace

"ostraca COMMAND --help" explains a command. Exit codes: 0 success, 1 failure, 2 bad usage, 3 refused in
the present state, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in *argv* (default: process arguments); return the exit code.

    Never raises.
    """
    # NumPy, imported later, starts a BLAS thread for each core; no command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters missing in the encoding become escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    options = argparse.Namespace()
    try:
        _parser().parse_args(argv, options)
    except SystemExit as end:  # argparse has printed the error or the help
        return _ended(options, end.code if isinstance(end.code, int) else BAD_USAGE)
    try:
        return _ended(options, _run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OstracaError, OSError, MemoryError, RuntimeError, ImportError) as error:
        # After a failure of standard output, the unwritten text remains and fails again.
        if isinstance(error, OSError) and _ended(options, 0):
            return FAILED
        why = error_text(error)
        if not why:
            raise
        return _say(options, why, _code_of(error))


def _run(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _OF_THE_EXTRA:
            raise
        return _say(
            options,
            f"this command needs {missing}: pip install 'ostraca[{options.extra}]'",
            FAILED,
        )
    return code


def _code_of(error: Exception) -> int:
    if isinstance(error, StateConflictError):
        return STATE_CONFLICT
    return BAD_USAGE if isinstance(error, UsageError) else FAILED


def _ended(options: argparse.Namespace, code: int) -> int:
    """Return the exit code *code*, or a failure if the output was not written."""
    if not (trouble := flush_output(sys.stdout)):
        return code
    # A closed pipe is no error: readers such as `head` stop early.
    if trouble != os.strerror(errno.EPIPE):
        why = f"cannot write standard output: {trouble}; redirect the output, and run the command again"
        _say(options, why, FAILED)
    return code or FAILED


def _say(options: argparse.Namespace, why: object, code: int) -> int:
    sys.stderr.write(f"{final_error_line(options, why)}\n")
    return code


class _Parser(argparse.ArgumentParser):
    """Parser that rejects unknown arguments with the command's own usage.

    argparse would leave the error to the top-level parser, with a usage text that omits the command.
    """

    def parse_known_args(  # type: ignore[override]  # as argparse's own, whose overloads say no more
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; exits on unknown arguments."""
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
        add_options(added, *command.options)
        added.set_defaults(run=command.run, extra=command.extra)
    return parser
