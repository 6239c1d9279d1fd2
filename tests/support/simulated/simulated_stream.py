"""One end of a simulated connection: a transport whose bytes travel over a ``Link``.

Bytes wait unsent at their sender until the window has room, travel in pieces and in order, and wait at the
receiver while it does not read. What a link that is cut holds goes on when it heals. An end that has closed
answers what still comes with a reset, as a kernel does.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

_HIGH_BYTES = 64 << 10
"""Unsent bytes above which a protocol is asked to pause."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How bytes travel from one host to another."""

    delay_s: tuple[float, float] = (20e-6, 200e-6)
    """The least and the most that a piece is under way, apart from the link's speed."""

    bytes_per_s: float = 1e10
    """What all connections over the link share."""

    piece_bytes_max: int = 64 << 10
    """Pieces have 1 to so many bytes."""

    window_bytes: int = 256 << 10
    """What one connection has under way, or waiting for its reader."""


class Link:
    """The way from one host to another, for all connections between them."""

    def __init__(self, settings: LinkSettings, dice: random.Random) -> None:
        self.settings = settings
        self.dice = dice
        self.is_cut = False
        self._free_s = 0.0

    def delay_s(self) -> float:
        """Roll how long something short takes."""
        return self.dice.uniform(*self.settings.delay_s)

    def piece_bytes(self) -> int:
        """Roll how long a piece is."""
        return self.dice.randint(1, min(self.settings.window_bytes, self.settings.piece_bytes_max))

    def due_s(self, now_s: float, count: int) -> float:
        """Tell when *count* bytes sent now are there."""
        self._free_s = max(self._free_s, now_s) + count / self.settings.bytes_per_s
        return self._free_s + self.delay_s()


class _Sign(Enum):
    END = auto()
    RESET = auto()


class SimulatedTransport(asyncio.Transport):
    """One end. ``joined`` makes two, and ``begin`` hands one to its protocol."""

    def __init__(self, host: str, to_host: str, link: Link, extra: dict[str, Any]) -> None:
        super().__init__(extra)
        self.host = host
        self.to_host = to_host
        self.is_dead = False
        """Whether its host crashed: it says nothing any more, and calls nobody."""

        self.may_answer: Callable[[], bool] = lambda: True
        """Whether its host answers what comes to an end that is gone."""

        self.when_gone: Callable[[SimulatedTransport], None] = lambda _: None
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._other: SimulatedTransport
        self._protocol: asyncio.BaseProtocol | None = None
        self._unsent = bytearray()
        self._under_way: deque[tuple[float, bytes | _Sign]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._piece_bytes = 0  # of the next piece, once that is rolled
        self._unread_bytes = 0  # under way, or waiting for the reader
        self._unsaid_bytes = 0  # read there, which a cut link keeps from being known here
        self._arrived: deque[bytes | _Sign] = deque()
        self._high_bytes, self._low_bytes = _HIGH_BYTES, _HIGH_BYTES // 4
        self._is_protocol_paused = False
        self._is_reading = True
        self._is_delivering = False
        self._is_closing = False
        self._is_end_written = False
        self._is_end_sent = False
        self.is_gone = False
        """Whether its protocol has heard the last, or is about to; what it sent may still be under way."""

    # What the network does.

    @property
    def other(self) -> SimulatedTransport:
        """The other end."""
        return self._other

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand this end to its protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._deliver()

    def go_on(self) -> None:
        """Note that the link out, or back, has healed."""
        now_s = self._loop.time()
        dues = [max(due_s, now_s + self._link.delay_s()) for due_s, _ in self._under_way]
        items = [item for _, item in self._under_way]
        last_s = now_s
        self._under_way.clear()
        for due_s, item in zip(dues, items, strict=True):
            last_s = max(last_s, due_s)
            self._under_way.append((last_s, item))
        self._set_timer()
        self._credit(0)

    def lose(self, error: Exception | None) -> None:
        """End it from below."""
        self._unsent.clear()
        self._go(error)

    def die(self, *, silently: bool) -> None:
        """Let its host crash; unless *silently*, the other end is reset behind what is under way."""
        if self.is_dead:
            return
        self.is_dead = self.is_gone = self._is_closing = True
        self._unsent.clear()
        self._arrived.clear()
        if not silently:
            self._send_sign(_Sign.RESET)
        self.when_gone(self)

    # Writing, as asyncio.Transport says.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, copied."""
        if self._is_end_written:
            raise RuntimeError("nothing is written behind the end")
        if self._is_closing or not data:
            return
        self._unsent += data
        self._send()
        self._ask_to_pause()

    def can_write_eof(self) -> bool:
        """Tell that it can be closed by halves."""
        return True

    def write_eof(self) -> None:
        """Send the end behind what is unsent."""
        self._is_end_written = True
        self._send()

    def get_write_buffer_size(self) -> int:
        """Count the unsent bytes."""
        return len(self._unsent)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return (low, high)."""
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Say when the protocol is asked to pause, and to resume."""
        self._high_bytes = high if high is not None else (_HIGH_BYTES if low is None else 4 * low)
        self._low_bytes = low if low is not None else self._high_bytes // 4
        self._ask_to_pause()

    # Reading and ending.

    def is_reading(self) -> bool:
        """Whether what comes is handed over."""
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        """Hand nothing over for now."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Hand over what came, and what comes."""
        self._is_reading = True
        self._loop.call_soon(self._deliver)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return who hears of what happens."""
        assert self._protocol is not None, "it has begun"
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Change who hears of what happens."""
        self._protocol = protocol

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_closing

    def close(self) -> None:
        """Send what is unsent, and end; nothing more is handed over."""
        if not self._is_closing:
            self._is_closing = True
            self._arrived.clear()
            self._send()

    def abort(self) -> None:
        """End now, without what is unsent."""
        self._unsent.clear()
        self._arrived.clear()
        self._is_closing = True
        if not self.is_gone:
            self._send_end()
        self._go(None)

    # Below.

    def _send(self) -> None:
        while self._unsent:
            # A piece waits for room for all of it: to fill what room there is would make ever smaller ones.
            self._piece_bytes = self._piece_bytes or self._link.piece_bytes()
            count = min(self._piece_bytes, len(self._unsent))
            if self._unread_bytes and self._unread_bytes + count > self._link.settings.window_bytes:
                break
            self._piece_bytes = 0
            piece = bytes(self._unsent[:count])
            del self._unsent[:count]
            self._unread_bytes += count
            self._send_off(piece, count)
        if not self._unsent and (self._is_end_written or self._is_closing) and not self.is_gone:
            self._send_end()
            if self._is_closing:
                self._go(None)

    def _send_end(self) -> None:
        if not self._is_end_sent:
            self._is_end_sent = True
            self._send_sign(_Sign.END)

    def _send_sign(self, sign: _Sign) -> None:
        self._send_off(sign, 1)

    def _send_off(self, item: bytes | _Sign, count: int) -> None:
        due_s = self._link.due_s(self._loop.time(), count)
        if self._under_way:
            due_s = max(due_s, self._under_way[-1][0])
        self._under_way.append((due_s, item))
        if len(self._under_way) == 1:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._under_way and not self._link.is_cut:
            self._timer = self._loop.call_at(self._under_way[0][0], self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        if self._link.is_cut:
            return
        _, item = self._under_way.popleft()
        self._set_timer()
        self._other._take(item)

    def _take(self, item: bytes | _Sign) -> None:
        if item is _Sign.RESET:
            self.lose(ConnectionResetError("reset by the other host"))
        elif not self._is_closing:
            self._arrived.append(item)
            self._deliver()
        elif isinstance(item, bytes) and self.is_gone and self.may_answer():
            self._send_sign(_Sign.RESET)

    def _deliver(self) -> None:
        """Hand over what arrived, as far as it is wanted."""
        if self._is_delivering or self._protocol is None:
            return
        self._is_delivering = True
        try:
            while self._arrived and self.is_reading():
                item = self._arrived.popleft()
                if isinstance(item, bytes):
                    self._feed(self._protocol, item)
                    self._other._credit(len(item))
                elif not self._ended(self._protocol):
                    self.close()
        except Exception as error:  # noqa: BLE001 (a protocol's mistake ends its connection, as on a socket)
            self._loop.call_exception_handler({"message": "a protocol failed", "exception": error})
            self.abort()
        finally:
            self._is_delivering = False

    def _feed(self, protocol: asyncio.BaseProtocol, piece: bytes) -> None:
        if isinstance(protocol, asyncio.Protocol):
            protocol.data_received(piece)
            return
        assert isinstance(protocol, asyncio.BufferedProtocol), "there is no other kind of stream protocol"
        left = memoryview(piece)
        while left and not self._is_closing:
            buffer = memoryview(protocol.get_buffer(len(left)))
            count = min(len(left), len(buffer))
            buffer[:count] = left[:count]
            protocol.buffer_updated(count)
            left = left[count:]

    def _ended(self, protocol: asyncio.BaseProtocol) -> bool | None:
        assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
        return protocol.eof_received()

    def _credit(self, count: int) -> None:
        """Note that the other end has read; its word of it comes back over its own link."""
        self._unsaid_bytes += count
        if self._other._link.is_cut:
            return
        self._unread_bytes -= self._unsaid_bytes
        self._unsaid_bytes = 0
        if self.is_gone and not self._unsent:
            return
        self._send()
        if self._is_protocol_paused and len(self._unsent) <= self._low_bytes:
            self._is_protocol_paused = False
            if not self.is_gone:
                self.get_protocol().resume_writing()

    def _ask_to_pause(self) -> None:
        if len(self._unsent) > self._high_bytes and not self._is_protocol_paused and not self.is_gone:
            self._is_protocol_paused = True
            self.get_protocol().pause_writing()

    def _go(self, error: Exception | None) -> None:
        """Let the connection be gone at this end."""
        if self.is_gone:
            return
        self.is_gone = self._is_closing = True
        self._arrived.clear()
        self.when_gone(self)
        self._loop.call_soon(self._say_gone, error)

    def _say_gone(self, error: Exception | None) -> None:
        if self._protocol is not None and not self.is_dead:
            self._protocol.connection_lost(error)


def joined(
    caller: SimulatedTransport, called: SimulatedTransport
) -> tuple[SimulatedTransport, SimulatedTransport]:
    """Make two ends those of one connection."""
    caller._other, called._other = called, caller
    return caller, called
