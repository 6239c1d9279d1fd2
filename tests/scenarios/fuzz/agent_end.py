"""An agent against workers, peers and operators who say whatever they like.

Each case is one conversation. Whatever it was, the agent has answered a Ping, or refused and closed, within
seconds; all it said are whole messages that the caller's role may hear, and a Refused is its last word.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import deque

from tests.fabric.connection.bulk import bulk_frame
from tests.scenarios.fuzz.frames import bulk, mutated, nonsense
from tests.scenarios.fuzz.worker_script import WorkerScript, hello, odd_hello

from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.frames import BulkEnd, FrameReader, encode
from ostraca_fabric.wire.messages import Fetch, Message, Ping, Pong, Refused, Welcome

ANSWER_S = 10.0
LINGERING_MAX = 50
FRAME_BYTES_MAX = 4 << 20
LAST_PING = 0x5EED
_HEARD = {"worker": codec.TO_WORKER, "agent": codec.TO_AGENT, "operator": codec.TO_OPERATOR}


class Conversation:
    """One raw connection to an agent."""

    def __init__(self, path: str, role: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(path)
        self._reader = FrameReader(lambda *_: None, frame_bytes_max=FRAME_BYTES_MAX)
        self._role = role
        self.is_welcome = False
        self.is_over = False
        self.last: object = None
        self.taken = 0
        self.fetches: list[Fetch] = []

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def say(self, data: bytes) -> bool:
        """Send bytes; False when the agent has hung up."""
        if not data or self.is_over:
            return not self.is_over
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self.is_over = True
        return not self.is_over

    def end(self) -> None:
        """Say that nothing more comes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def hear(self, until: type[Message] | None = None) -> None:
        """Listen until a message of a kind has come, or the agent has hung up."""
        while not self.is_over:
            try:
                count = self._socket.recv_into(self._reader.buffer())
            except TimeoutError as error:
                raise AssertionError(f"no answer within {ANSWER_S} s; last heard: {self.last}") from error
            except ConnectionResetError:
                count = 0
            if not count:
                self.is_over = True
                return
            has_come = False
            for event in self._reader.received(count):
                assert not isinstance(event, ProtocolError), f"the agent broke the wire's rules: {event}"
                if isinstance(event, BulkEnd):
                    continue
                has_come |= self._take(event, until)
            if has_come:
                return

    def _take(self, payload: bytes, until: type[Message] | None) -> bool:
        assert not isinstance(self.last, Refused), "something was said after a refusal"
        decoder = _HEARD[self._role] if self.is_welcome else codec.HELLO_ANSWER
        self.last = decoder.decode(payload)
        if isinstance(self.last, Fetch):
            self.fetches.append(self.last)
        if isinstance(self.last, Welcome):
            self.is_welcome = True
        if until is Ping:
            return isinstance(self.last, Pong) and self.last.request == LAST_PING
        return until is not None and isinstance(self.last, until)


class AgentEnd:
    """Cases against the agent that listens at a unix socket. Close it in the end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lingering: deque[Conversation] = deque()

    def close(self) -> None:
        """Hang up where that was not done."""
        while self._lingering:
            self._lingering.popleft().close()

    def case(self, dice: random.Random) -> int:
        """Hold one conversation; return how many frames the agent is known to have taken.

        A frame counts when a Ping behind it was answered, or when it was the connection's last. Some
        connections are left open in the middle of something while others are held.
        """
        role = dice.choice(("worker",) * 6 + ("agent", "operator"))
        talk = Conversation(self._path, role)
        try:
            if dice.random() < 0.3:
                self._before_welcome(dice, talk, role)
            else:
                self._after_welcome(dice, talk, role)
        except BaseException:
            talk.close()
            raise
        self._lingering.append(talk)
        keep = LINGERING_MAX if dice.random() < 0.05 else len(self._lingering) - 1
        if len(self._lingering) > keep:
            (self._lingering.popleft() if keep == LINGERING_MAX else self._lingering.pop()).close()
        return talk.taken + 1

    def _before_welcome(self, dice: random.Random, talk: Conversation, role: str) -> None:
        match dice.randrange(6):
            case 0:
                talk.say(dice.randbytes(dice.randrange(1, 100)))
            case 1:
                talk.say(mutated(dice, hello(dice, role)))
            case 2:
                talk.say(bytes(encode(hello(dice, role)) * 2))
            case 3:
                talk.say(bytes(encode(WorkerScript(dice, hello(dice, role)).next())))
            case 4:
                talk.say(bulk(dice, transfers=[], places=[]))
            case _:
                talk.say(bytes(encode(odd_hello(dice))))
        if dice.random() < 0.8:
            talk.end()
            talk.hear()

    def _after_welcome(self, dice: random.Random, talk: Conversation, role: str) -> None:
        said = hello(dice, role)
        for piece in _in_pieces(dice, bytes(encode(said))):
            talk.say(piece)
        talk.hear(Welcome)
        assert talk.is_welcome, talk.last
        script = WorkerScript(dice, said)
        if role == "worker" and dice.random() < 0.9:
            talk.say(bytes(encode(script.opening())))
        for _ in range(dice.randrange(1, 4)):
            frames = [bytes(encode(script.next())) for _ in range(dice.choice((1, 10, 40, 100)))]
            for piece in _in_pieces(dice, b"".join(frames)):
                talk.say(piece)
            if not talk.say(bytes(encode(Ping(LAST_PING)))):
                return
            talk.hear(Ping)
            if talk.is_over:
                return
            talk.taken += len(frames) + 1
            self._answer_fetches(dice, talk)
        self._last_words(dice, talk, script)

    def _answer_fetches(self, dice: random.Random, talk: Conversation) -> None:
        """Bring what the agent has asked for by now, more or less."""
        for fetch in talk.fetches:
            lengths = codec.u32(fetch.lengths, len(fetch.lengths) // 4).tolist()
            parts = [(part, bytes(each)) for part, each in enumerate(lengths)]
            if dice.random() < 0.2:
                dice.shuffle(parts)
            if dice.random() < 0.2:
                parts.pop()
            if parts and dice.random() < 0.1:
                parts.append(dice.choice(parts))
            while parts:
                count = dice.choice((1, 2, len(parts)))
                talk.say(bulk_frame(fetch.transfer, *parts[:count]))
                del parts[:count]
        talk.fetches.clear()

    def _last_words(self, dice: random.Random, talk: Conversation, script: WorkerScript) -> None:
        match dice.randrange(7):
            case 0 | 1:
                last = mutated(dice, script.next())
            case 2:
                last = bytes(encode(script.misplaced()))
            case 3:
                last = nonsense(dice)
            case 4:
                last = bulk(dice, transfers=[fetch.transfer for fetch in talk.fetches], places=[0, 1])
            case 5:
                whole = bytes(encode(script.next()))
                last = whole[: dice.randrange(len(whole))]
            case _:
                last = b""
        talk.say(last)
        if dice.random() < 0.7:
            talk.end()
            talk.hear()


def _in_pieces(dice: random.Random, data: bytes) -> list[bytes]:
    if dice.random() < 0.7:
        return [data]
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randrange(1, 6)))
    return [data[first:last] for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True)]
