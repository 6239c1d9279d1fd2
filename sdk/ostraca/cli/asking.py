"""How commands reach an agent to ask it something: by its address, over TLS with files that were named, with
a token that speaks for who asks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca.places import TLS_VARIABLES
from ostraca_fabric.errors import FormatError, UsageError

if TYPE_CHECKING:
    import argparse

    from ostraca_fabric.connection import ClientConnection
    from ostraca_fabric.ids import TenantId
    from ostraca_fabric.tls import TlsFiles
    from ostraca_fabric.wire.messages import Hello

TOKEN_VARIABLE = "OSTRACA_TOKEN"  # noqa: S105 (the variable's name, not a token)

_OPTIONS = (
    ("--tls-ca", "the CA that signs agents' certificates, for tls:// addresses"),
    ("--tls-cert", "our own certificate, where agents ask for one"),
    ("--tls-key", "its private key"),
)


def add_token_option(parser: argparse.ArgumentParser) -> None:
    """Let the user name the file of tokens, for ``chosen_token``."""
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="the fabric's file of tokens, to ask agents over TCP or TLS with (or give a token in "
        f"{TOKEN_VARIABLE})",
    )


def chosen_token(options: argparse.Namespace, tenant: TenantId | None = None) -> str:
    """Return the token that speaks for a tenant, or for operators. Raises FormatError when the file that was
    named has none.
    """
    if options.tokens is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    from ostraca.cli.serve.secret_files import read_access

    access = read_access(options.tokens, os.getuid())
    found = access.fabric_tokens if tenant is None else access.tenant_tokens.get(tenant, ())
    if not found:
        whose = "fabric token" if tenant is None else f"token of tenant {tenant}"
        raise FormatError(f"{options.tokens} has no {whose}: add one, or name the agents' own file")
    return found[0]


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Let the user name files of TLS, for ``chosen_files``."""
    for (flag, meaning), variable in zip(_OPTIONS, TLS_VARIABLES, strict=True):
        parser.add_argument(flag, metavar="FILE", type=Path, help=f"{meaning} (or give it in {variable})")


def chosen_files(options: argparse.Namespace) -> TlsFiles | None:
    """Return the files that were named, by option or in the environment; None without a CA.

    Raises UsageError for a certificate without its key.
    """
    from ostraca_fabric.tls import TlsFiles

    given = (options.tls_ca, options.tls_cert, options.tls_key)
    ca, cert, key = (
        path or (Path(os.environ[variable]) if os.environ.get(variable) else None)
        for path, variable in zip(given, TLS_VARIABLES, strict=True)
    )
    return TlsFiles(ca, cert, key) if ca else None


async def connected(address: str, hello: Hello, files: TlsFiles | None) -> ClientConnection:
    """Return a connection to the agent at *address*.

    Raises ConnectError, and UsageError where the files can't be used or are lacking.
    """
    from ostraca_fabric.connection import SocketNetwork, connect
    from ostraca_fabric.tls import Tls
    from ostraca_fabric.wire.address import TlsAddress, parse_address

    is_tls = isinstance(parse_address(address), TlsAddress)
    if is_tls and files is None:
        raise UsageError(
            f"{address} takes the CA that signs agents' certificates: give its file with --tls-ca, or in "
            f"{TLS_VARIABLES[0]}"
        )
    return await connect(address, hello, network=SocketNetwork(Tls(files) if is_tls and files else None))
