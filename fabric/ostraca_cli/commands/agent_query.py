"""Connections of commands to an agent.

A connection takes an address, TLS files for ``tls://`` addresses, and a token of the caller.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostraca_cli.command import AddOption, directory_option, one_of, option
from ostraca_fabric.errors import FormatError, ProtocolError, RefusedError, UsageError
from ostraca_fabric.sockets.default_paths import TLS_VARIABLES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from ostraca_fabric.connection import ClientConnection
    from ostraca_fabric.model.ids import TenantId
    from ostraca_fabric.sockets.tls import TlsFiles
    from ostraca_fabric.telemetry.status import AgentStatus
    from ostraca_fabric.wire.messages import Explain, Hello, StatusRequest

TOKEN_VARIABLE = "OSTRACA_TOKEN"  # noqa: S105 (the variable's name, not a token)

_Answer = TypeVar("_Answer")

ANSWER_S = 5.0

_TLS_OPTIONS = tuple(
    option(flag, metavar="FILE", type=Path, help=f"{meaning} (default: {variable})")
    for flag, variable, meaning in zip(
        ("--tls-ca", "--tls-cert", "--tls-key"),
        TLS_VARIABLES,
        (
            "CA of agents' certificates, for tls:// addresses",
            "client certificate, if agents require one",
            "private key of the client certificate",
        ),
        strict=True,
    )
)

TOKENS = option(
    "--tokens",
    type=Path,
    metavar="FILE",
    help=f"file of tokens, for agents over TCP or TLS (default: the token in {TOKEN_VARIABLE})",
)
"""Option for the file of tokens, for ``chosen_token``."""


def address_options(flag: str = "") -> tuple[AddOption, ...]:
    """Describe the options for an agent's address and TLS files.

    The address is positional, or the value of *flag*.
    """
    meaning = "any agent, if not this host's: unix:///path/to/socket, tcp://host:port or tls://host:port"
    address = (
        option(flag, dest="address", metavar="ADDRESS", help=meaning)
        if flag
        else option("address", nargs="?", metavar="ADDRESS", help=meaning)
    )
    return one_of(address, directory_option("directory of a fabric that `ostraca up` runs")), *_TLS_OPTIONS


@dataclass(frozen=True, slots=True)
class FabricStatus:
    """Answers of all agents. ``silent``: (id, first address, reason) of each silent agent."""

    agents: tuple[AgentStatus, ...]
    silent: tuple[tuple[str, str, str], ...]


def chosen_token(options: argparse.Namespace, tenant: TenantId | None = None) -> str:
    """Return the token of a tenant, or of operators if *tenant* is None.

    Raises FormatError if the chosen file has no such token.
    """
    if options.tokens is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    from ostraca_cli.composition.secret_files import read_access

    access = read_access(options.tokens, os.getuid())
    found = access.fabric_tokens if tenant is None else access.tenant_tokens.get(tenant, ())
    if not found:
        kind = "fabric token" if tenant is None else f"token of tenant {tenant}"
        raise FormatError(f"{options.tokens} has no {kind}: add a token, or give the agents' own file")
    return found[0]


def chosen_files(options: argparse.Namespace) -> TlsFiles | None:
    """Return the TLS files from the options or the environment; None without a CA.

    Raises UsageError for a certificate without its key.
    """
    from ostraca_fabric.sockets.tls import TlsFiles

    given = (options.tls_ca, options.tls_cert, options.tls_key)
    ca, cert, key = (
        path or (Path(os.environ[variable]) if os.environ.get(variable) else None)
        for path, variable in zip(given, TLS_VARIABLES, strict=True)
    )
    return TlsFiles(ca, cert, key) if ca else None


async def connected(address: str, hello: Hello, files: TlsFiles | None) -> ClientConnection:
    """Connect to the agent at *address*.

    Raises ConnectError, and UsageError if the TLS files are missing or unusable.
    """
    from ostraca_fabric.connection import SocketNetwork, connect
    from ostraca_fabric.sockets.tls import Tls
    from ostraca_fabric.wire.address import TlsAddress, parse_address

    is_tls = isinstance(parse_address(address), TlsAddress)
    if is_tls and files is None:
        raise UsageError(
            f"{address} needs the CA of agents' certificates: give its file with --tls-ca, or in "
            f"{TLS_VARIABLES[0]}"
        )
    return await connect(address, hello, network=SocketNetwork(Tls(files) if is_tls and files else None))


async def query_agent(
    address: str,
    hello: Hello,
    files: TlsFiles | None,
    request: Callable[[int], Explain | StatusRequest],
    answer_type: type[_Answer],
) -> _Answer:
    """Send a request, made by *request* from its number, to the agent at *address*.

    Raises ConnectError, TimeoutError, UsageError, RefusedError or ProtocolError.
    """
    from ostraca_fabric.wire.messages import Failure

    connection = await connected(address, hello, files)
    try:
        answer = await connection.ask(request(connection.next_request_id()), ANSWER_S)
    finally:
        connection.close()
    if isinstance(answer, Failure):
        raise RefusedError(answer.code, answer.message)
    if not isinstance(answer, answer_type):
        raise ProtocolError(
            f"{address} answered {type(answer).__name__} instead of {answer_type.__name__}: check the address"
        )
    return answer
