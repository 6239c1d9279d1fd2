"""``ostraca status``: status of every agent of a fabric, queried over the wire."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ostraca_cli.command import JSON, Command, option
from ostraca_cli.commands.agent_query import (
    TOKEN_VARIABLE,
    TOKENS,
    FabricStatus,
    address_options,
    chosen_files,
    chosen_token,
    query_agent,
)
from ostraca_fabric.errors import AuthenticationError, ConnectError, OstracaError, UsageError
from ostraca_fabric.runtime.sentences import counted, named
from ostraca_fabric.sockets.default_paths import DAEMON_SOCKET, agent_socket, default_directory

if TYPE_CHECKING:
    from ostraca_fabric.sockets.tls import TlsFiles
    from ostraca_fabric.telemetry.status import AgentStatus

_WATCH_S = 1.0


def _run(options: argparse.Namespace) -> int:
    address = chosen_address(options)
    token, files = chosen_token(options), chosen_files(options)
    if options.watch and not options.json and sys.stdout.isatty():
        _watch(address, token, files)
    code = _show_once(address, token, files, is_json=options.json)
    while options.watch:
        sys.stdout.flush()
        time.sleep(_WATCH_S)
        code = _show_once(address, token, files, is_json=options.json)
    return code


def chosen_address(options: argparse.Namespace) -> str:
    """Return the address of an agent: as passed, of a fabric of ``ostraca up``, or of the host's daemon.

    Raises ConnectError if none runs there, and UsageError if there is no default directory either.
    """
    if options.address:
        return str(options.address)
    sockets, obstacle = list[Path](), None
    try:
        directory = options.dir or default_directory(os.environ)
        sockets.append(agent_socket(directory, 0))
    except UsageError as error:
        obstacle = error
    if not options.dir:
        sockets.append(DAEMON_SOCKET)
    forbidden: list[Path] = []
    for where in sockets:
        try:
            # Connect, because a killed fabric leaves its socket file behind.
            with socket.socket(socket.AF_UNIX) as trial:
                trial.connect(str(where))
        except PermissionError:
            forbidden.append(where)
        except OSError:
            continue
        else:
            return f"unix://{where}"
    if forbidden:
        raise ConnectError(
            f"user {os.getuid()} may not connect to {forbidden[0]}: run as the user of the fabric, or pass "
            "--dir of your own fabric"
        )
    if obstacle is not None:
        raise obstacle
    raise ConnectError(
        f"no fabric runs in {directory}: start one with `ostraca up --dir {directory}`, "
        "or pass the address of an agent"
    )


async def ask_fabric(address: str, token: str = "", files: TlsFiles | None = None) -> FabricStatus:
    """Query the agent at *address*, then every agent known to that agent.

    Raises ConnectError if the first agent is gone.
    """
    first = await ask(address, token, files)
    others = [(agent, where) for agent, where in first.agents if agent != first.agent]
    answers = await asyncio.gather(*(ask(where, token, files) for _, where in others), return_exceptions=True)
    agents, silent = [first], []
    for (agent, where), answer in zip(others, answers, strict=True):
        if isinstance(answer, AuthenticationError) and not token:
            why = f"a fabric token is required: give --tokens FILE, or a token in {TOKEN_VARIABLE}"
            silent.append((agent, where, why))
        elif isinstance(answer, OstracaError | OSError):
            silent.append((agent, where, str(answer)))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            agents.append(answer)
    return FabricStatus(tuple(sorted(agents, key=lambda status: status.agent)), tuple(silent))


async def ask(address: str, token: str = "", files: TlsFiles | None = None) -> AgentStatus:
    """Return the status of an agent; raises ConnectError, TimeoutError or UsageError."""
    from ostraca_fabric.telemetry.status import AgentStatus
    from ostraca_fabric.wire.codec import read_body
    from ostraca_fabric.wire.handshake import OPERATOR, hello_for
    from ostraca_fabric.wire.messages import StatusDone, StatusRequest

    hello = hello_for(OPERATOR, "", f"ostraca status:{os.getpid()}", token)
    answer = await query_agent(address, hello, files, StatusRequest, StatusDone)
    return read_body(answer.body, AgentStatus)


def as_json(status: FabricStatus) -> str:
    """Return JSON with ``agents`` as received, and the ``silent`` agents."""
    import msgspec

    silent = [{"agent": agent, "address": where, "reason": why} for agent, where, why in status.silent]
    return msgspec.json.format(msgspec.json.encode({"agents": status.agents, "silent": silent})).decode()


def _show_once(address: str, token: str, files: TlsFiles | None, *, is_json: bool) -> int:
    from ostraca_cli.commands.unavailable_view import unserved_shards

    found = asyncio.run(ask_fabric(address, token, files))
    if is_json:
        print(as_json(found))
    else:
        from ostraca_cli.commands.status_view import fabric_view
        from ostraca_cli.terminal.tables import print_view

        print_view(fabric_view(found))
    for agent, where, why in found.silent:
        sys.stderr.write(f"ostraca: {agent} at {where} does not answer: {why}\n")
    overdue = [each.shard for each in unserved_shards(found) if each.is_overdue]
    if overdue:
        sys.stderr.write(
            f"ostraca: {counted(len(overdue), 'shard')} not served by any agent: {named(overdue)}\n"
        )
    return 1 if found.silent or overdue else 0


def _watch(address: str, token: str, files: TlsFiles | None) -> NoReturn:
    """Refresh the status until KeyboardInterrupt; raises if the agent goes away."""
    from rich.live import Live

    from ostraca_cli.commands.status_view import fabric_view

    with Live(auto_refresh=False) as live:
        while True:
            live.update(fabric_view(asyncio.run(ask_fabric(address, token, files))), refresh=True)
            time.sleep(_WATCH_S)


COMMAND = Command(
    name="status",
    summary="show the state of a fabric, as seen by its agents",
    description=(
        "Query an agent, then all agents of the fabric: fill of shards, hits and misses, and the latest\n"
        f"decision of each agent. Over TCP and TLS agents need a token: set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca status --dir /tmp/fabric\n"
        "  (tables of agents and shards)\n"
        "  agent-0: serving 2 of 2 shards; no changes\n"
    ),
    options=(
        *address_options(),
        TOKENS,
        JSON,
        option("--watch", action="store_true", help="refresh every second, until Ctrl-C"),
    ),
    run=_run,
)
