"""Options, requests and output shared by all commands that query the admin service."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.command import AddOption, action, group, option, seconds_argument
from ostraca_cli.terminal.streams import write_line
from ostraca_cli.terminal.units import size_argument
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.model.ids import checked_name
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.sockets.default_paths import (
    ADMIN_TOKEN_VARIABLE,
    ADMIN_URL,
    ADMIN_URL_VARIABLE,
    TLS_VARIABLES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_admin.api.views import OperationView
    from ostraca_cli.commands.admin.client import AdminClient, AdminResponse

DEFAULT_TIMEOUT_S = 30.0

SERVICE_OPTIONS = (
    group(
        "the admin service",
        option(
            "--admin",
            metavar="URL",
            help=f"URL of the service (default: {ADMIN_URL_VARIABLE}, else {ADMIN_URL})",
        ),
        option(
            "--token-file",
            type=Path,
            metavar="FILE",
            help=f"file with a bearer token and nothing else (default: the token in {ADMIN_TOKEN_VARIABLE})",
        ),
        option(
            "--tls-ca",
            type=Path,
            metavar="FILE",
            help="CA of the service's certificate, if unknown to this machine "
            f"(default: the file in {TLS_VARIABLES[0]})",
        ),
        option(
            "--timeout",
            type=seconds_argument,
            default=DEFAULT_TIMEOUT_S,
            metavar="S",
            help="longest wait for a response, in seconds (default: 30)",
        ),
    ),
    option("--json", action="store_true", help="print the response as received, on one line"),
)
"""Options for the admin service (for ``client_of``) and ``--json``."""


def service_action(
    name: str, act: Callable[[argparse.Namespace], int], *options: AddOption, **texts: str
) -> AddOption:
    """Describe the action *act* with its own options and those common to all actions."""
    return action(name, act, *SERVICE_OPTIONS, *options, **texts)


def if_match(subject: str) -> AddOption:
    """Describe the option that makes a change conditional on an ETag."""
    meaning = f"refuse after a change since `ostraca {subject} show` printed this ETag"
    return option("--if-match", default="", metavar="ETAG", help=meaning)


ETAG = option("--etag", action="store_true", help="print only the ETag, for --if-match")
WATCH = option(
    "--watch",
    action="store_true",
    help="follow the operation to its end; with --json, print a line for each change",
)


def volume_argument(text: str) -> tuple[str, str]:
    """Parse TENANT/NAME."""
    tenant, _, name = text.partition("/")
    if not (tenant and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is no volume: write TENANT/NAME")
    return tenant, name


def name_argument(noun: str) -> Callable[[str], str]:
    """Return the parser of a name for argparse; *noun* names the object in the message."""
    return lambda text: _checked(partial(checked_name, noun), text)


def nguid_argument(text: str) -> str:
    """Parse an NGUID, for argparse."""
    return _checked(check_nguid, text)


def optional(parse: Callable[[str], str]) -> Callable[[str], str]:
    """Return a parser for argparse that accepts an empty text as well."""
    return lambda text: text and parse(text)


def segment_argument(text: str) -> int:
    """Parse the size of a segment, for argparse; 0 means the default."""
    from ostraca_fabric.model.extent import MIB, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN  # loads numpy

    size_bytes = size_argument(text)
    if size_bytes and (size_bytes % MIB or not SEGMENT_BYTES_MIN <= size_bytes <= SEGMENT_BYTES_MAX):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of a segment: write whole MiB, from {SEGMENT_BYTES_MIN // MIB}MiB to "
            f"{SEGMENT_BYTES_MAX // MIB}MiB"
        )
    return size_bytes


def _checked(check: Callable[[str], str], text: str) -> str:
    try:
        return check(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def client_of(options: argparse.Namespace) -> AdminClient:
    """Return a client of the chosen service; raises UsageError and FormatError."""
    from ostraca_cli.commands.admin.client import AdminClient

    ca = options.tls_ca or (Path(os.environ[TLS_VARIABLES[0]]) if os.environ.get(TLS_VARIABLES[0]) else None)
    token = (
        _token(options.token_file) if options.token_file else os.environ.get(ADMIN_TOKEN_VARIABLE, "").strip()
    )
    if not token.isascii() or not token.isprintable():
        where = options.token_file or ADMIN_TOKEN_VARIABLE
        raise UsageError(f"{where} has no valid token: write printable ASCII characters on one line")
    url = options.admin or os.environ.get(ADMIN_URL_VARIABLE) or ADMIN_URL
    return AdminClient(url, token=token, ca=ca, timeout_s=options.timeout)


def ask(options: argparse.Namespace, method: str, path: str, *fields: str) -> AdminResponse:
    """Send the options named *fields* to *path*, where ``{name}`` stands for an option."""
    from ostraca_cli.commands.admin.client import quoted

    given = vars(options)
    named = {name: (each,) if isinstance(each, str) else each for name, each in given.items()}
    where = path.format_map(
        {name: "/".join(map(quoted, each)) for name, each in named.items() if isinstance(each, tuple)}
    )
    body = {name: given[name] for name in fields} if fields else None
    return client_of(options).ask(method, where, body, if_match=given.get("if_match", ""))


def print_list(options: argparse.Namespace, kind: str) -> int:
    """Print the list at ``/v1/kind``, as a table or as JSON."""
    pages = client_of(options).pages(f"/v1/{kind}")
    if options.json:
        write_pages(pages)
    else:
        from ostraca_cli.commands.admin.view import show_list

        show_list(kind, pages)
    return 0


def show(options: argparse.Namespace, kind: str, path: str) -> int:
    """Print the resource at *path*, as in ``ask``."""
    return print_resource(options, kind, ask(options, "GET", path))


def print_resource(options: argparse.Namespace, kind: str, response: AdminResponse) -> int:
    """Print one resource of a kind of ``view``, as a view or JSON, or print its ETag."""
    if getattr(options, "etag", False):
        print(response.etag)
    elif options.json:
        write_line(response.body)
    else:
        from ostraca_cli.commands.admin.view import show_resource

        show_resource(kind, response.body, response.etag)
    return 0


def print_done(options: argparse.Namespace, response: AdminResponse, line: str) -> int:
    """Print the response to a change as JSON, or *line*."""
    if options.json:
        write_line(response.body)
    else:
        print(line)
    return 0


def change(options: argparse.Namespace, path: str, fields: tuple[str, ...]) -> int:
    """Request a long operation by the options named *fields*; report or follow the operation."""
    from ostraca_admin.api.views import OperationView
    from ostraca_cli.commands.admin.responses import read

    response = ask(options, "POST", path, *fields)
    return report_start(options, read(response.body, OperationView), response)


def report_start(options: argparse.Namespace, operation: OperationView, response: AdminResponse) -> int:
    """Report a recorded operation, or follow the operation if asked; raises like ``watch``."""
    from ostraca_cli.commands.admin.watching import watch, watch_hint

    if options.watch:
        return watch(client_of(options), operation.id, is_json=options.json)
    line = f"{operation.title} has started as operation {operation.id}: {watch_hint(operation.id)}"
    return print_done(options, response, line)


def write_pages(pages: Iterator[bytes], *, last: int | None = None) -> None:
    """Print a list undecoded, with several pages joined into one.

    With *last*, print only that many items.
    """
    import msgspec

    from ostraca_cli.commands.admin.responses import PageInfo, raw_items

    first, *rest = pages
    if rest or last:
        listed = raw_items((first, *rest))
        first = msgspec.json.encode(PageInfo(listed[-last:] if last else listed))
    write_line(first)


def _token(file: Path) -> str:
    from ostraca_cli.composition.secret_files import read_secret

    text = read_secret(file).decode(errors="replace").strip()
    if not text or len(text.splitlines()) > 1:
        raise FormatError(f"{file} is no token file: write one token on one line, and nothing else")
    return text
