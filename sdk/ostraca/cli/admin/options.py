"""The options that all commands share which ask the admin service."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.cli.command import seconds_argument
from ostraca.places import TLS_VARIABLES
from ostraca_fabric.errors import FormatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ostraca.cli.admin.client import AdminClient

DEFAULT_URL = "http://127.0.0.1:7480"
URL_VARIABLE = "OSTRACA_ADMIN_URL"
TOKEN_VARIABLE = "OSTRACA_ADMIN_TOKEN"  # noqa: S105 (the variable's name, not a token)
DEFAULT_TIMEOUT_S = 30.0


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    act: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Let the user do *act*, with what all such actions take."""
    parser = actions.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(act=act)
    add_asking_options(parser)
    return parser


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Let the user say which admin service is asked, for ``client_of``, and ask for JSON."""
    group = parser.add_argument_group("the admin service")
    group.add_argument(
        "--admin",
        metavar="URL",
        help=f"where it is (or in {URL_VARIABLE}; default: {DEFAULT_URL})",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file that holds the token to show it, and nothing else (or give it in {TOKEN_VARIABLE})",
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="the CA that signs its certificate, where this machine does not know it (or in "
        f"{TLS_VARIABLES[0]})",
    )
    group.add_argument(
        "--timeout",
        type=seconds_argument,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="wait so long for it, in seconds (default: 30)",
    )
    parser.add_argument("--json", action="store_true", help="print what it answers as it came, in a line")


def add_if_match(parser: argparse.ArgumentParser, what: str) -> None:
    """Let the user ask for a change of only what has not changed since."""
    parser.add_argument(
        "--if-match",
        default="",
        metavar="ETAG",
        help=f"only if it was not changed since `ostraca {what} show` said this ETag",
    )


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Let the user follow long work."""
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow it to its end; with --json, a line for each change of the operation",
    )


def volume_argument(text: str) -> tuple[str, str]:
    """Read TENANT/NAME."""
    tenant, _, name = text.partition("/")
    if not (tenant and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is no volume: write TENANT/NAME")
    return tenant, name


def client_of(options: argparse.Namespace) -> AdminClient:
    """Return who asks the service that the user named. Raises UsageError and FormatError."""
    from ostraca.cli.admin.client import AdminClient

    ca = options.tls_ca or (Path(os.environ[TLS_VARIABLES[0]]) if os.environ.get(TLS_VARIABLES[0]) else None)
    token = _token(options.token_file) if options.token_file else os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token.isascii() or not token.isprintable():
        where = options.token_file or TOKEN_VARIABLE
        raise UsageError(f"{where} holds no token: one is printable ASCII, in one line")
    url = options.admin or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    return AdminClient(url, token=token, ca=ca, timeout_s=options.timeout)


def write_json(body: bytes) -> None:
    """Print an answer as it came."""
    sys.stdout.write(body.decode(errors="replace").rstrip("\n") + "\n")
    sys.stdout.flush()


def write_pages(pages: Iterator[bytes], *, last: int | None = None) -> None:
    """Print a list as it came; one of several pages as if it had had room in one. *last*: only so many."""
    import msgspec

    from ostraca.cli.admin.answers import Page, raw_items

    first = next(pages)
    rest = list(pages)
    if rest or last:
        listed = raw_items((first, *rest))
        first = msgspec.json.encode(Page(listed[-last:] if last else listed))
    write_json(first)


def _token(file: Path) -> str:
    from ostraca.cli.serve.secret_files import read_secret

    text = read_secret(file).decode(errors="replace").strip()
    if not text or len(text.splitlines()) > 1:
        raise FormatError(f"{file} is no file of one token: it holds the token in one line, and nothing else")
    return text
