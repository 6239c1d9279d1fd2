"""The short form of ``make fuzz``: each end for a few seconds, and the frames that are almost right, shrunk.

A failure of the first kind prints its seed and case, and ``python -m tests.scenarios.fuzz`` repeats it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fabric.wire.samples import SAMPLES
from tests.scenarios.fuzz.agent_end import Conversation
from tests.scenarios.fuzz.decoding import decode, decoding_case
from tests.scenarios.fuzz.fabric_process import FabricProcess
from tests.scenarios.fuzz.frames import mutated, nonsense
from tests.scenarios.fuzz.healthy_worker import HealthyWorker
from tests.scenarios.fuzz.targets import TARGETS, run_target
from tests.scenarios.fuzz.worker_script import WorkerScript, hello

from ostraca_fabric.wire.frames import encode
from ostraca_fabric.wire.messages import Ping

SEED = 1


@pytest.mark.parametrize(("name", "frames"), [("decoding", 5_000), ("agent", 3_000), ("sdk", 3_000)])
def test_a_few_thousand_wrong_frames_harm_nobody(tmp_path: Path, name: str, frames: int) -> None:
    assert set(TARGETS) == {"decoding", "agent", "sdk"}
    assert run_target(name, tmp_path, seed=SEED, frames=frames, seconds=30, say=print) >= frames


@given(dice=st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_stream_of_frames_that_are_almost_right_is_read_or_refused(dice: random.Random) -> None:
    assert decoding_case(dice) >= 0


@given(stream=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_read_or_refused(stream: bytes, cuts: list[int]) -> None:
    assert decode(stream, sorted(cut for cut in cuts if cut <= len(stream))) >= 0


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabricProcess]:
    with FabricProcess(tmp_path_factory.mktemp("fuzz") / "agent") as started:
        yield started


def test_a_connection_may_be_closed_at_any_byte(fabric: FabricProcess) -> None:
    """A handshake and a request of every kind, cut off behind each byte, politely and not."""
    dice = random.Random(SEED)
    greeting = bytes(encode(hello(dice, "worker")))
    script = WorkerScript(dice, hello(dice, "worker"))
    transcript = (
        greeting + bytes(encode(script.opening())) + b"".join(bytes(encode(script.next())) for _ in range(6))
    )
    path = fabric.address.removeprefix("unix://")
    with HealthyWorker(fabric.address):
        for end in range(min(len(transcript), 900)):
            talk = Conversation(path, "worker")
            talk.say(transcript[:end])
            if end % 3 == 0:
                talk.end()
                talk.hear()
            talk.close()
    fabric.check()


def test_half_a_frame_holds_up_its_own_connection_only(fabric: FabricProcess) -> None:
    dice = random.Random(SEED)
    path = fabric.address.removeprefix("unix://")
    with contextlib.ExitStack() as open_ones, HealthyWorker(fabric.address):
        for number in range(60):
            talk = Conversation(path, "worker")
            open_ones.callback(talk.close)
            frame = (
                mutated(dice, hello(dice, "worker")) if number % 2 else bytes(encode(hello(dice, "worker")))
            )
            talk.say(frame[: dice.randrange(len(frame))])
        other = Conversation(path, "operator")
        open_ones.callback(other.close)
        other.say(bytes(encode(hello(dice, "operator")) + encode(Ping(7))))
        # A request before the Welcome is refused, also from who is in a hurry.
        other.hear()
        assert other.is_over


def test_every_sample_is_mutated_into_something_else_sooner_or_later() -> None:
    dice = random.Random(SEED)
    for sample in SAMPLES:
        assert any(mutated(dice, sample) != bytes(encode(sample)) for _ in range(5))
    assert len({nonsense(dice) for _ in range(50)}) > 25
