"""Options and output shared by all commands that query the admin service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.command import seconds_argument
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.sockets.default_paths import (
    ADMIN_TOKEN_VARIABLE,
    ADMIN_URL,
    ADMIN_URL_VARIABLE,
    TLS_VARIABLES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca_cli.commands.admin.client import AdminClient, AdminResponse

DEFAULT_TIMEOUT_S = 30.0


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    act: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add the action *act* with the options common to all actions."""
    parser = actions.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(act=act)
    add_service_options(parser)
    return parser


def add_service_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the admin service (for ``client_of``) and ``--json``."""
    group = parser.add_argument_group("the admin service")
    group.add_argument(
        "--admin",
        metavar="URL",
        help=f"URL of the service (default: {ADMIN_URL_VARIABLE}, else {ADMIN_URL})",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with a bearer token and nothing else (default: the token in {ADMIN_TOKEN_VARIABLE})",
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="CA of the service's certificate, if unknown to this machine "
        f"(default: the file in {TLS_VARIABLES[0]})",
    )
    group.add_argument(
        "--timeout",
        type=seconds_argument,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="longest wait for a response, in seconds (default: 30)",
    )
    parser.add_argument("--json", action="store_true", help="print the response as received, on one line")


def add_if_match(parser: argparse.ArgumentParser, subject: str) -> None:
    """Add the option that makes a change conditional on an ETag."""
    parser.add_argument(
        "--if-match",
        default="",
        metavar="ETAG",
        help=f"refuse after a change since `ostraca {subject} show` printed this ETag",
    )


def add_etag(parser: argparse.ArgumentParser) -> None:
    """Add the option for printing the ETag only."""
    parser.add_argument("--etag", action="store_true", help="print only the ETag, for --if-match")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the option for following a long operation."""
    parser.add_argument(
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


def print_list(options: argparse.Namespace, kind: str) -> int:
    """Print the list at ``/v1/kind``, as a table or as JSON."""
    pages = client_of(options).pages(f"/v1/{kind}")
    if options.json:
        write_pages(pages)
    else:
        from ostraca_cli.commands.admin.view import show_list

        show_list(kind, pages)
    return 0


def print_resource(options: argparse.Namespace, kind: str, response: AdminResponse) -> int:
    """Print one resource of a kind in ``view.RESOURCES``, as a view or JSON, or print its ETag."""
    if getattr(options, "etag", False):
        print(response.etag)
    elif options.json:
        write_json(response.body)
    else:
        from ostraca_cli.commands.admin.view import show_resource

        show_resource(kind, response.body, response.etag)
    return 0


def write_json(body: bytes) -> None:
    """Print a response undecoded."""
    sys.stdout.write(body.decode(errors="replace").rstrip("\n") + "\n")
    sys.stdout.flush()


def write_pages(pages: Iterator[bytes], *, last: int | None = None) -> None:
    """Print a list undecoded, with several pages joined into one.

    With *last*, print only that many items.
    """
    import msgspec

    from ostraca_cli.commands.admin.responses import PageInfo, raw_items

    first = next(pages)
    rest = list(pages)
    if rest or last:
        listed = raw_items((first, *rest))
        first = msgspec.json.encode(PageInfo(listed[-last:] if last else listed))
    write_json(first)


def _token(file: Path) -> str:
    from ostraca_cli.composition.secret_files import read_secret

    text = read_secret(file).decode(errors="replace").strip()
    if not text or len(text.splitlines()) > 1:
        raise FormatError(f"{file} is no token file: write one token on one line, and nothing else")
    return text
