"""``ostraca status``: what every agent of a fabric believes, asked over the wire."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ostraca.cli.asking import add_tls_options, chosen_files, connected
from ostraca.cli.command import Command
from ostraca.places import agent_socket, default_directory, directory_argument
from ostraca_fabric.errors import ConnectError, FormatError, OstracaError, ProtocolError
from ostraca_fabric.sentences import counted, named

if TYPE_CHECKING:
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.tls import TlsFiles

TOKEN_VARIABLE = "OSTRACA_TOKEN"  # noqa: S105 (the variable's name, not a token)
_ANSWER_S = 5.0
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class FabricStatus:
    """What the agents said. ``silent``: (id, first address, why) of each agent that did not answer."""

    agents: tuple[AgentStatus, ...]
    silent: tuple[tuple[str, str, str], ...]


def add_address_options(parser: argparse.ArgumentParser, *, flag: str = "") -> None:
    """Let the user say which agent to ask, for ``chosen_address``: by position, or behind *flag*."""
    where = parser.add_mutually_exclusive_group()
    meaning = "any agent: unix:///path/to/socket, tcp://host:port or tls://host:port"
    if flag:
        where.add_argument(flag, dest="address", metavar="ADDRESS", help=meaning)
    else:
        where.add_argument("address", nargs="?", metavar="ADDRESS", help=meaning)
    where.add_argument(
        "--dir",
        type=directory_argument,
        help=f"the directory of a fabric that `ostraca up` runs (default: {default_directory(os.environ)})",
    )
    add_tls_options(parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_address_options(parser)
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="the fabric's file of tokens, to ask agents over TCP or TLS with (or give a token in "
        f"{TOKEN_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")


def _run(options: argparse.Namespace) -> int:
    address = chosen_address(options)
    token, files = _token(options.tokens), chosen_files(options)
    if options.watch and not options.json:
        _watch(address, token, files)
    code = _show_once(address, token, files, is_json=options.json)
    while options.watch:
        sys.stdout.flush()
        time.sleep(_WATCH_S)
        code = _show_once(address, token, files, is_json=True)
    return code


def _token(file: Path | None) -> str:
    """Return the token that speaks for operators. Raises FormatError."""
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "")
    from ostraca.cli.serve.secret_files import read_access

    tokens = read_access(file, os.getuid()).fabric_tokens
    if not tokens:
        raise FormatError(f"{file} has no fabric token")
    return tokens[0]


def chosen_address(options: argparse.Namespace) -> str:
    """Return the address of one agent. Raises ConnectError when no fabric runs in the directory."""
    if options.address:
        return str(options.address)
    directory = options.dir or default_directory(os.environ)
    where = agent_socket(directory, 0)
    try:
        # Not is_socket alone: a fabric that was killed leaves its socket behind.
        with socket.socket(socket.AF_UNIX) as trial:
            trial.connect(str(where))
    except OSError as error:
        raise ConnectError(
            f"no fabric runs in {directory}: start one with `ostraca up --dir {directory}`, "
            "or pass the address of an agent"
        ) from error
    return f"unix://{where}"


async def ask_fabric(address: str, token: str = "", files: TlsFiles | None = None) -> FabricStatus:
    """Ask the agent at *address*, then every agent it knows. Raises ConnectError if the first is gone."""
    first = await ask(address, token, files)
    others = [(agent, where) for agent, where in first.agents if agent != first.agent]
    answers = await asyncio.gather(*(ask(where, token, files) for _, where in others), return_exceptions=True)
    agents, silent = [first], []
    for (agent, where), answer in zip(others, answers, strict=True):
        if isinstance(answer, OstracaError | OSError):
            silent.append((agent, where, str(answer)))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            agents.append(answer)
    return FabricStatus(tuple(sorted(agents, key=lambda status: status.agent)), tuple(silent))


async def ask(address: str, token: str = "", files: TlsFiles | None = None) -> AgentStatus:
    """Return what one agent believes. Raises ConnectError, TimeoutError or UsageError."""
    from ostraca_fabric.status import AgentStatus
    from ostraca_fabric.wire.codec import read_body
    from ostraca_fabric.wire.handshake import OPERATOR, WorkerHandshake
    from ostraca_fabric.wire.messages import Status, StatusDone

    hello = WorkerHandshake(OPERATOR, "", f"ostraca status:{os.getpid()}", token).hello
    connection = await connected(address, hello, files)
    try:
        answer = await connection.ask(Status(connection.next_request_id()), _ANSWER_S)
    finally:
        connection.close()
    if not isinstance(answer, StatusDone):
        raise ProtocolError(
            f"{type(answer).__name__} is no answer to a question for the status: is {address} an agent?"
        )
    return read_body(answer.body, AgentStatus)


def as_json(status: FabricStatus) -> str:
    """Write it for programs: ``agents`` as each agent said it, and who is ``silent``."""
    import msgspec

    silent = [{"agent": agent, "address": where, "why": why} for agent, where, why in status.silent]
    return msgspec.json.format(msgspec.json.encode({"agents": status.agents, "silent": silent})).decode()


def _show_once(address: str, token: str, files: TlsFiles | None, *, is_json: bool) -> int:
    from ostraca.cli.unserved_view import served_by_nobody

    found = asyncio.run(ask_fabric(address, token, files))
    if is_json:
        print(as_json(found))
    else:
        from rich.console import Console

        from ostraca.cli.status_view import fabric_view

        Console().print(fabric_view(found))
    for agent, where, why in found.silent:
        sys.stderr.write(f"ostraca: {agent} at {where} does not answer: {why}\n")
    overdue = [each.shard for each in served_by_nobody(found) if each.is_overdue]
    if overdue:
        sys.stderr.write(f"ostraca: {counted(len(overdue), 'shard')} served by nobody: {named(overdue)}\n")
    return 1 if found.silent or overdue else 0


def _watch(address: str, token: str, files: TlsFiles | None) -> NoReturn:
    """Show it for ever; ends by KeyboardInterrupt, or raises when the agent goes away."""
    from rich.live import Live

    from ostraca.cli.status_view import fabric_view

    with Live(auto_refresh=False) as live:
        while True:
            live.update(fabric_view(asyncio.run(ask_fabric(address, token, files))), refresh=True)
            time.sleep(_WATCH_S)


COMMAND = Command(
    name="status",
    summary="show what the agents of a fabric believe",
    description=(
        "Ask one agent, then every agent it knows: shards and how full they are, hits and misses, and in a\n"
        f"sentence what each decided last. Over TCP and TLS they want a token: set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca status --dir /tmp/fabric\n"
        "  (tables of agents and shards)\n"
        "  agent-0: I serve 2 of 2 shards; nothing to do.\n"
    ),
    add_options=_add_options,
    run=_run,
)
