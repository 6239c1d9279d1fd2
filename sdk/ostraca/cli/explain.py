"""``ostraca explain``: what is known of one block, and what has happened to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import TYPE_CHECKING

from ostraca.cli.asking import TOKEN_VARIABLE, add_token_option, chosen_files, chosen_token, connected
from ostraca.cli.command import Command
from ostraca.cli.status import add_address_options, chosen_address
from ostraca_fabric.errors import ProtocolError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca_fabric.chain import Span
    from ostraca_fabric.explain import BlockEvent, BlockExplanation
    from ostraca_fabric.tls import TlsFiles
    from ostraca_fabric.wire.messages import Hello

_ANSWER_S = 5.0
_EVENT_LAYOUT = "  {time}  {agent:<10} {label:<14} {kind:<14} {state:<10} {reason}"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hash", metavar="ENGINE_HASH", type=_hash, help="its hash in the engine, in hex")
    parser.add_argument("--volume", required=True, metavar="NAME", help="the block's volume")
    parser.add_argument("--tenant", default="default", help="the volume's tenant (default: %(default)s)")
    parser.add_argument("--rank", type=_number, default=0, metavar="N", help="the block's rank (default: 0)")
    parser.add_argument("--group", type=_number, default=0, metavar="N", help="its KV group (default: 0)")
    parser.add_argument(
        "--root",
        type=_hash,
        metavar="HASH",
        help="the hash that begins the block's stripe unit: of the 1st, 33rd, 65th ... block of its chain, "
        "the last one up to this (default: ENGINE_HASH, for blocks without a chain)",
    )
    # Behind a flag: argparse gives a second position up when options stand between the two.
    add_address_options(parser, flag="--agent")
    add_token_option(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no hash: write it in hex") from error


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: count from 0")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    from ostraca_fabric.chain import Span
    from ostraca_fabric.wire.handshake import WORKER, WorkerHandshake

    engine_hash = options.hash
    span = Span(engine_hash, len(engine_hash), options.root or engine_hash, (1,), options.rank, options.group)
    token = chosen_token(options, options.tenant)
    hello = WorkerHandshake(WORKER, options.tenant, f"ostraca explain:{os.getpid()}", token).hello
    asking = ask(chosen_address(options), hello, options.volume, span, chosen_files(options))
    found = asyncio.run(asking)
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
    """Ask an agent about one block, as the worker that says *hello*.

    Raises ConnectError, TimeoutError, RefusedError or UsageError.
    """
    from ostraca_fabric.explain import BlockExplanation
    from ostraca_fabric.wire.codec import read_body
    from ostraca_fabric.wire.messages import Explain, Explained, Failed

    connection = await connected(address, hello, files)
    try:
        asked = Explain(connection.next_request_id(), _ANSWER_S, volume, (span,))
        answer = await connection.ask(asked, _ANSWER_S)
    finally:
        connection.close()
    if isinstance(answer, Failed):
        raise RefusedError(answer.code, answer.message)
    if not isinstance(answer, Explained):
        raise ProtocolError(f"{type(answer).__name__} is no answer to an Explain")
    return read_body(answer.body, BlockExplanation)


def explanation_lines(found: BlockExplanation, *, now_s: float) -> Iterator[str]:
    """Write an explanation for people; *now_s* is the time of day that it was given at."""
    from ostraca_fabric.explain import age_text, verdict

    view = found.owner_view
    yield verdict(found)
    yield ""
    owner = found.owner or "nobody"
    epoch = f" under epoch {view.owner_epoch}" if view is not None and view.is_owner else ""
    yield f"belongs to   shard {found.shard or '(none)'}, which {owner} owns{epoch}"
    yield f"DRAM         of {found.agent}: {'it is there' if found.is_cached else 'not there'}"
    yield f"index        {_index_text(found)}"
    reach = age_text(found.events_reach_s)
    yield f"events       that {found.agent} and the owner remember, back to {reach} ago"
    for event in found.events:
        yield _event_text(event, now_s)
    if not found.events:
        yield "  none of this block"


def _index_text(found: BlockExplanation) -> str:
    from ostraca_fabric.extent import Generation, generation_parts

    view = found.owner_view
    if view is None or not view.is_owner:
        return "the owner did not answer"
    if not view.is_listed:
        return "not listed" + ("; it is being written" if view.is_being_written else "")
    epoch, count = generation_parts(Generation(view.generation))
    pinned = "; its segment is pinned" if view.is_pinned else ""
    withheld = "; the owner before may still use it" if view.is_withheld else ""
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
    summary="say why a block is, or was, a miss",
    description=(
        "Ask an agent about one block: where it belongs, whether it can be got now, and what has happened\n"
        "to it lately, with the label under which agents and worker logged each request. The agent asks\n"
        f"the block's owner, too. Over TCP and TLS it wants a token of the tenant:\n"
        f"give --tokens, or set {TOKEN_VARIABLE}."
    ),
    example=(
        "  $ ostraca explain 2cf24dba... --volume llama-70b --dir /tmp/fabric\n"
        "  It can't be got: it was evicted with its segment 12 s ago, to make room.\n"
        "  ...\n"
        "  13:04:07.118  agent-0    5eed1234/7     put            COMMITTED\n"
        "  13:41:55.020  agent-0    -              evicted\n"
    ),
    add_options=_add_options,
    run=_run,
)
