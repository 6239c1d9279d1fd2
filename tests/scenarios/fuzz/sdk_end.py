"""A client of an agent that answers nonsense.

Each case is one call of the client's public API. Whatever the agent says: the call ends by its deadline, with
a result or an OstracaError; a block that is a HIT has exactly its bytes, in a view for as long as it is
lent, and memory of a block that is none was not touched with anything else; the books of the arena agree;
and no thread has died of it.
"""

from __future__ import annotations

import contextlib
import random
import select
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from tests.scenarios.fuzz.nonsense_agent import NonsenseAgent, content_of
from tests.support.invariants import check_ledger

import ostraca
from ostraca import BlockState, GetResult
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import VolumeIdentity

BLOCK_BYTES = 8192
DEADLINE_S = 0.03
SLACK_S = 3.0
LAYOUT = ostraca.Layout(model="nonsense", dtype="bf16", page_tokens=16, tensor_parallel=4)
IDENTITY = VolumeIdentity(TenantId("default"), "v", LAYOUT.digest())
SETTINGS = ostraca.ClientSettings(
    arena_bytes=64 * BLOCK_BYTES,
    chunk_bytes=16 * BLOCK_BYTES,
    transports=("inline",),
    quarantine_bytes_max=48 * BLOCK_BYTES,
    put_window_bytes=4 * BLOCK_BYTES,
    redial_s=0.0001,
)
HASHES = tuple(bytes([number + 1]) * 32 for number in range(40))
UNTOUCHED = 0xEE
_NO_RESULT = GetResult(b"", b"")


class SdkEnd:
    """Cases of one client. Use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.agent = NonsenseAgent(directory / "nonsense.sock", IDENTITY)
        self._deaths: list[str] = []
        self._client: ostraca.Client | None = None
        self._volume: ostraca.Volume | None = None

    def __enter__(self) -> Self:
        self._hook = threading.excepthook
        threading.excepthook = self._on_death
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
        self.agent.stop()
        threading.excepthook = self._hook

    def _on_death(self, death: threading.ExceptHookArgs) -> None:
        self._deaths.append(f"{death.thread}: {death.exc_value!r}")
        self._hook(death)

    def case(self, dice: random.Random) -> int:
        """Make one call; return how many frames the agent said meanwhile."""
        self.agent.dice = random.Random(dice.getrandbits(64))
        before, began_s = self.agent.frames, time.monotonic()
        with contextlib.suppress(OstracaError):
            self._call(dice)
        took_s = time.monotonic() - began_s
        assert took_s < DEADLINE_S + SLACK_S, f"a call took {took_s:.2f} s"
        assert not self._deaths, self._deaths
        if self._client is not None:
            with self._client._runtime.arena.changed:
                check_ledger(self._client._runtime.arena.ledger)
        return self.agent.frames - before

    def _call(self, dice: random.Random) -> None:
        volume = self._opened(dice)
        rank, first = dice.choice((0, 3)), dice.randrange(len(HASHES))
        chain = volume.chain(HASHES, rank=rank)[first : first + dice.choice((1, 1, 2, 8, 40))]
        match dice.randrange(9):
            case 0 | 1:
                _get(volume, chain)
            case 2:
                _submit_gets(self._client, volume, chain, cancels=dice.random() < 0.3)
            case 3 | 4:
                _get_views(volume, chain)
            case 5:
                source = np.stack([np.frombuffer(each, np.uint8) for each in _blocks(chain)])
                put = volume.put(chain, source=source, deadline_s=DEADLINE_S)
                assert len(put.states) == len(chain)
            case 6:
                found = volume.lookup([chain, chain[:1]], deadline_s=DEADLINE_S, pin_s=0.1)
                assert len(found.states) == len(chain) + 1
                assert len(found.reasons) == len(chain) + 1
            case 7:
                assert len(volume.prefetch(chain, deadline_s=DEADLINE_S).states) == len(chain)
            case _:
                assert self._client is not None
                self._client.status(timeout_s=DEADLINE_S)

    def _opened(self, dice: random.Random) -> ostraca.Volume:
        if self._client is not None and dice.random() < 0.02:
            self._client.close()
            assert self._client.quarantined_bytes == 0, "inline memory stays behind"
            self._client = self._volume = None
        if self._client is None:
            self._client = ostraca.connect(self.agent.address, settings=SETTINGS, timeout_s=DEADLINE_S)
        if self._volume is None or dice.random() < 0.01:
            self._volume = self._client.volume(
                "v", LAYOUT, block_bytes=BLOCK_BYTES, create=True, timeout_s=DEADLINE_S
            )
        return self._volume


def _blocks(chain: ostraca.Chain) -> list[bytes]:
    width = chain.hash_bytes
    return [
        content_of(chain.hashes[at * width : (at + 1) * width], BLOCK_BYTES)
        for at in range(chain.start, chain.stop)
    ]


def _get(volume: ostraca.Volume, chain: ostraca.Chain) -> None:
    into = np.full((len(chain), BLOCK_BYTES), UNTOUCHED, np.uint8)
    _check(volume.get(chain, into=into, deadline_s=DEADLINE_S), into, chain)


def _check(result: GetResult, into: NDArray[np.uint8], chain: ostraca.Chain) -> None:
    assert len(result.states) == len(result.reasons) == len(chain)
    for state, found, right in zip(result.states, into, _blocks(chain), strict=True):
        is_right = found.tobytes() == right
        assert is_right or state is not BlockState.HIT, "a HIT with wrong bytes"
        assert is_right or bool((found == UNTOUCHED).all()), "wrong bytes in the memory of a miss"


def _submit_gets(
    client: ostraca.Client | None, volume: ostraca.Volume, chain: ostraca.Chain, *, cancels: bool
) -> None:
    """Have two gets under way for one event loop."""
    assert client is not None
    memory = [np.full((len(chain), BLOCK_BYTES), UNTOUCHED, np.uint8) for _ in range(2)]
    tickets = [volume.submit_get(chain, into=into, deadline_s=DEADLINE_S) for into in memory]
    if cancels:
        client.cancel(tickets[0])
    done: dict[ostraca.Ticket, GetResult] = {}
    while len(done) < len(tickets):
        assert select.select([client], [], [], DEADLINE_S + SLACK_S)[0], "a ticket that is never done"
        for each in client.take_completions():
            if each.error is not None:
                assert isinstance(each.error, OstracaError), repr(each.error)
            assert each.error is not None or isinstance(each.result, GetResult)
            done[each.ticket] = each.result if isinstance(each.result, GetResult) else _NO_RESULT
    for ticket, into in zip(tickets, memory, strict=True):
        if done[ticket] is not _NO_RESULT:
            _check(done[ticket], into, chain)


def _get_views(volume: ostraca.Volume, chain: ostraca.Chain) -> None:
    with volume.get_views(chain, lengths=BLOCK_BYTES, deadline_s=DEADLINE_S) as views:
        blocks = _blocks(chain)
        for _ in range(3):
            for state, view, right in zip(views.result.states, views, blocks, strict=True):
                assert (view is not None) == (state is BlockState.HIT)
                assert view is None or bytes(view) == right, "a view of other bytes than the block's"
            # The agent goes on talking meanwhile.
            time.sleep(0.0005)
