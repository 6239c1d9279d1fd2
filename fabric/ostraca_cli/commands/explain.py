"""``ostraca explain``: state and history of a single block."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import TYPE_CHECKING

from ostraca_cli.command import JSON, Command, number_argument, option
from ostraca_cli.commands.agent_query import (
    ANSWER_S,
    TOKEN_VARIABLE,
    TOKENS,
    address_options,
    chosen_files,
    chosen_token,
    query_agent,
)
from ostraca_cli.commands.status import chosen_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca_fabric.model.chain import Span
    from ostraca_fabric.sockets.tls import TlsFiles
    from ostraca_fabric.telemetry.explain import BlockEvent, BlockExplanation
    from ostraca_fabric.wire.messages import Hello

_EVENT_LAYOUT = "  {time}  {agent:<10} {label:<14} {kind:<14} {state:<10} {reason}"


def _hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no hash: write hex digits") from error


def _run(options: argparse.Namespace) -> int:
    from ostraca_fabric.model.chain import Span
    from ostraca_fabric.wire.handshake import WORKER, hello_for

    engine_hash = options.hash
    span = Span(engine_hash, len(engine_hash), options.root or engine_hash, (1,), options.rank, options.group)
    token = chosen_token(options, options.tenant)
    hello = hello_for(WORKER, options.tenant, f"ostraca explain:{os.getpid()}", token)
    found = asyncio.run(ask(chosen_address(options), hello, options.volume, span, chosen_files(options)))
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for line in explanation_lines(found, now_s=time.time()):
            print(line)
    return 0


async def ask(
    address: str, hello: Hello, volume: str, span: Span, files: TlsFiles | None = None
) -> BlockExplanation:
    """Ask an agent about a block, as the worker in *hello*.

    Raises ConnectError, TimeoutError, RefusedError or UsageError.
    """
    from ostraca_fabric.telemetry.explain import BlockExplanation
    from ostraca_fabric.wire.codec import read_body
    from ostraca_fabric.wire.messages import Explain, Explained

    answer = await query_agent(
        address, hello, files, lambda number: Explain(number, ANSWER_S, volume, (span,)), Explained
    )
    return read_body(answer.body, BlockExplanation)


def explanation_lines(found: BlockExplanation, *, now_s: float) -> Iterator[str]:
    """Write an explanation for people, given at the time of day *now_s*."""
    from ostraca_fabric.telemetry.explain import age_text, verdict

    view = found.owner_view
    yield verdict(found)
    yield ""
    owner = found.owner or "no agent"
    epoch = f" under epoch {view.owner_epoch}" if view is not None and view.is_owner else ""
    yield f"location     shard {found.shard or '(none)'}, owned by {owner}{epoch}"
    yield f"DRAM cache   of {found.agent}: {'present' if found.is_cached else 'absent'}"
    yield f"staging      of {found.agent}: {'present' if found.is_staged else 'absent'}"
    yield f"index        {_index_text(found)}"
    reach = age_text(found.events_reach_s)
    yield f"events       kept by {found.agent} and the owner, back to {reach} ago"
    yield from [_event_text(event, now_s) for event in found.events] or ["  none for this block"]


def _index_text(found: BlockExplanation) -> str:
    from ostraca_fabric.model.extent import Generation, generation_parts

    view = found.owner_view
    if view is None or not view.is_owner:
        return "the owner did not answer"
    if not view.is_listed:
        return "not listed" + ("; a write is in progress" if view.is_being_written else "")
    epoch, count = generation_parts(Generation(view.generation))
    pinned = "; segment pinned" if view.is_pinned else ""
    withheld = "; the previous owner may still use the segment" if view.is_withheld else ""
    place = f"{view.length} bytes at {view.offset}, in generation {epoch}.{count} of its segment"
    return place + pinned + withheld


def _event_text(event: BlockEvent, now_s: float) -> str:
    at_s = now_s - event.age_s
    clock = time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03}"
    return _EVENT_LAYOUT.format(
        time=clock,
        agent=event.agent,
        label=event.label or "-",
        kind=event.kind.lower().replace("_", " "),
        state=event.state,
        reason=event.reason,
    ).rstrip()


COMMAND = Command(
    name="explain",
    summary="explain hits and misses of a block",
    description=(
        "Show location, availability and recent events of a block, as known to an agent and the shard\n"
        "owner. Each event has the label of the request in logs of agents and workers. Over TCP and TLS\n"
        f"agents need a token of the tenant: give --tokens, or set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca explain 2cf24dba... --volume llama-70b --dir /tmp/fabric\n"
        "  It can't be got: it was evicted with its segment 12 s ago, to make room.\n"
        "  ...\n"
        "  13:04:07.118  agent-0    5eed1234/7     put            COMMITTED\n"
        "  13:41:55.020  agent-0    -              evicted\n"
    ),
    options=(
        option("hash", metavar="ENGINE_HASH", type=_hash, help="engine hash of the block, in hex"),
        option("--volume", required=True, metavar="NAME", help="volume of the block"),
        option("--tenant", default="default", help="tenant of the volume (default: %(default)s)"),
        option("--rank", type=number_argument, default=0, metavar="N", help="rank of the block (default: 0)"),
        option(
            "--group", type=number_argument, default=0, metavar="N", help="KV group of the block (default: 0)"
        ),
        option(
            "--root",
            type=_hash,
            metavar="HASH",
            help="first engine hash of the block's stripe unit: block 1, 33, 65 and so on in the chain "
            "(default: ENGINE_HASH, for blocks without a chain)",
        ),
        # A flag, because argparse loses a second positional argument if options stand between the two.
        *address_options("--agent"),
        TOKENS,
        JSON,
    ),
    run=_run,
)
