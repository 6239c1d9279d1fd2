"""Any argument is taken as what it means, or refused with advice; nothing else, and at nobody's cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fabric.fabric_host import FabricThread

import ostraca
from ostraca_cli.testing import small_plan

MIB = 1 << 20
BLOCK_BYTES = 4096
SETTINGS = ostraca.ClientSettings(arena_bytes=2 * MIB, chunk_bytes=MIB, transports=("inline",))
LAYOUT = ostraca.Layout(
    model="arguments",
    dtype="bf16",
    page_tokens=16,
    tensor_parallel=2,
    groups=(ostraca.KvGroup(1, 1, 1), ostraca.KvGroup(1, 1, 1, "sliding")),
)
FAR_S = 30.0


class Unspeakable:
    """Has no representation."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Word(str):
    """A text of another type."""

    __slots__ = ()


WHOLE_NUMBERS: list[Any] = [
    1,
    np.int64(1),
    np.uint8(1),
    np.int32(1),
    torch.tensor(1),
    np.array(1),
]
"""The same number, as engines have it."""

ODD: list[Any] = [
    None,
    True,
    False,
    np.True_,
    torch.tensor(True),
    0,
    -1,
    1 << 40,
    1 << 80,
    10**400,
    np.int64(3),
    np.uint64((1 << 64) - 1),
    1.0,
    1.5,
    float("nan"),
    float("inf"),
    -1e308,
    np.float32(0.5),
    np.float64("nan"),
    Decimal(1),
    Fraction(1, 3),
    1j,
    "",
    "1",
    "a word",
    "\ud800",
    "x" * 100_000,
    Word("word"),
    np.str_("word"),
    b"bytes",
    bytearray(8),
    memoryview(b"12345678"),
    Path("/tmp"),
    [],
    [1],
    [[1], [1, 2]],
    (1, 2),
    {},
    {1: 2},
    set(),
    object(),
    Unspeakable(),
    np.zeros(3),
    np.zeros((2, 2), np.uint8),
    np.array(["a"]),
    np.array([None]),
    np.dtype(np.float16),
    torch.bfloat16,
    torch.zeros(2, 2),
    torch.zeros(2, device="meta"),
    int,
    print,
    range(3),
    iter([1]),
    ostraca.Ack.STAGED,
    ostraca.KvGroup(1, 1, 1),
]
odd = st.sampled_from(ODD)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path_factory.mktemp("fabric") / "f")) as running:
        yield running


class Bystander:
    """Another thread of the same client, whose gets must not notice."""

    def __init__(self, volume: ostraca.Volume, chain: ostraca.Chain) -> None:
        self.outcomes: Counter[str] = Counter()
        self._volume, self._chain = volume, chain
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        into = np.zeros((len(self._chain), BLOCK_BYTES), np.uint8)
        while not self._ended.is_set():
            try:
                self.outcomes[repr(self._volume.get(self._chain, into=into, deadline_s=FAR_S))] += 1
            except ostraca.OstracaError as error:
                self.outcomes[repr(error)] += 1

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Scene:
    """A client with a stored chain, and a bystander."""

    def __init__(self, fabric: FabricThread) -> None:
        self.client = fabric.connect(SETTINGS)
        self.volume = self.client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        self.chain = self.volume.chain([bytes([block]) * 32 for block in range(4)])
        self.memory = np.ones((4, BLOCK_BYTES), np.uint8)
        put = self.volume.put(self.chain, source=self.memory, deadline_s=FAR_S, ack=ostraca.Ack.COMMITTED)
        assert put.accepted == 4
        self.bystander = Bystander(self.volume, self.chain)

    def close(self) -> None:
        """Check that nobody noticed, and that every slot is back."""
        self.bystander.end()
        assert set(self.bystander.outcomes) == {"<GetResult: 4 HIT; prefix 4>"}, self.bystander.outcomes
        with self.volume.slots(2 * MIB // BLOCK_BYTES, lengths=BLOCK_BYTES):
            """All of the arena."""
        self.client.close()


@pytest.fixture(scope="module")
def scene(fabric: FabricThread) -> Iterator[Scene]:
    built = Scene(fabric)
    yield built
    built.close()


def calls(scene: Scene, value: Any) -> dict[str, Callable[[], Any]]:
    """Pass a value as each argument that there is."""
    volume, client, chain, memory = scene.volume, scene.client, scene.chain, scene.memory
    layout: dict[str, Any] = {"model": "m", "dtype": "bf16", "page_tokens": 16}

    def views(lengths: Any, deadline_s: Any = FAR_S) -> None:
        volume.get_views(chain, lengths=lengths, deadline_s=deadline_s).release()

    def ticket(submit: Callable[[], Any]) -> None:
        client.cancel(submit())

    return {
        "chain": lambda: volume.chain(value),
        "chain of": lambda: volume.lookup(volume.chain([value]), deadline_s=1),
        "rank": lambda: volume.lookup(volume.chain([b"r" * 32], rank=value), deadline_s=1),
        "group": lambda: volume.lookup(volume.chain([b"r" * 32], group=value), deadline_s=1),
        "is_chained": lambda: volume.lookup(volume.chain([b"r" * 32], is_chained=value), deadline_s=1),
        "slice": lambda: chain[value:],
        "index": lambda: chain[value],
        "lookup": lambda: volume.lookup(value, deadline_s=1),
        "lookup of several": lambda: volume.lookup([chain, value], deadline_s=1),
        "lookup deadline_s": lambda: volume.lookup(chain, deadline_s=value),
        "pin_s": lambda: volume.lookup(chain, deadline_s=1, pin_s=value),
        "prefetch": lambda: volume.prefetch(value, deadline_s=1),
        "at": lambda: volume.prefetch(chain, deadline_s=0.02, at=value),
        "get": lambda: volume.get(value, into=memory, deadline_s=1),
        "into": lambda: volume.get(chain, into=value, deadline_s=1),
        "into a list": lambda: volume.get(chain, into=[value] * 4, deadline_s=1),
        "recompute_s": lambda: volume.get(chain, into=memory, deadline_s=1, recompute_s=value),
        "lengths": lambda: views(value),
        "lengths of several": lambda: views([value] * 4),
        "views deadline_s": lambda: views(BLOCK_BYTES, value),
        "source": lambda: volume.put(chain, source=value, deadline_s=1),
        "source of several": lambda: volume.put(chain, source=[[value]] * 4, deadline_s=1),
        "ack": lambda: volume.put(chain, source=memory, deadline_s=1, ack=value),
        "ttl_s": lambda: volume.put(chain, source=memory, deadline_s=1, ttl_s=value),
        "slots": lambda: volume.slots(value, lengths=BLOCK_BYTES).release(),
        "slots lengths": lambda: volume.slots(2, lengths=value).release(),
        "end_session": lambda: volume.end_session(value),
        "explain": lambda: volume.explain(value),
        "explain timeout_s": lambda: volume.explain(chain[:1], timeout_s=value),
        "submitted": lambda: ticket(lambda: volume.submit_get(chain, into=value, deadline_s=1)),
        "submitted rank": lambda: ticket(
            lambda: volume.submit_lookup(volume.chain([b"r" * 32], rank=value), deadline_s=1)
        ),
        "cancel": lambda: client.cancel(value),
        "status timeout_s": lambda: client.status(timeout_s=value),
        "volume": lambda: client.volume(value, LAYOUT, block_bytes=BLOCK_BYTES),
        "layout": lambda: client.volume("v", value, block_bytes=BLOCK_BYTES),
        "block_bytes": lambda: client.volume("v", LAYOUT, block_bytes=value),
        "create": lambda: client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=value),
        "break_even_tokens": lambda: client.volume(
            "v", LAYOUT, block_bytes=BLOCK_BYTES, break_even_tokens=value
        ),
        **{
            f"layout {name}": partial(open_layout, client, {**layout, name: value})
            for name in ostraca.Layout.__dataclass_fields__
        },
        **{
            f"KV group {name}": partial(open_layout, client, layout, {**GROUP, name: value}) for name in GROUP
        },
    }


GROUP: dict[str, Any] = {"layers": 1, "kv_heads": 2, "head_dim": 3, "kind": "attention"}


def open_layout(client: ostraca.Client, fields: dict[str, Any], group: dict[str, Any] | None = None) -> None:
    groups: dict[str, Any] = {"groups": [ostraca.KvGroup(**group)]} if group else {}
    client.volume("other", ostraca.Layout(**fields, **groups), block_bytes=BLOCK_BYTES)


@settings(max_examples=40)
@given(value=odd, data=st.data())
def test_any_argument_is_taken_or_refused_with_advice(scene: Scene, value: Any, data: st.DataObject) -> None:
    by_name = calls(scene, value)
    name = data.draw(st.sampled_from(sorted(by_name)))
    check_taken_or_refused(by_name[name], is_timeout="timeout" in name)


def check_taken_or_refused(call: Callable[[], Any], *, is_timeout: bool = False) -> None:
    words = "a sentence"
    try:
        call()
    except ostraca.UsageError as error:
        words = str(error)
    except (ostraca.UnknownVolumeError, ostraca.LayoutMismatchError):
        """It was taken, and there is no such volume."""
    except ostraca.ConnectError:
        if not is_timeout:  # which was taken, and is over
            raise
    assert len(words) in range(10, 1000), words


@pytest.mark.parametrize("number", range(len(ODD)))
def test_each_odd_value_as_each_argument_harms_no_other_thread(scene: Scene, number: int) -> None:
    before = scene.client._runtime.connections.session
    for name, call in calls(scene, ODD[number]).items():
        try:
            check_taken_or_refused(call, is_timeout="timeout" in name)
        except Exception as error:
            raise AssertionError(f"{name} = {type(ODD[number]).__name__}") from error
    scene.client._runner.do(lambda: None)
    assert scene.client._runtime.connections.session is before, "the agent has not cut the connection"


@pytest.mark.parametrize("number", WHOLE_NUMBERS, ids=lambda number: type(number).__name__)
def test_integers_of_numpy_and_torch_are_integers(scene: Scene, number: Any) -> None:
    volume = scene.volume
    chain = volume.chain([b"n" * 32], rank=number, group=number)
    assert chain == volume.chain([b"n" * 32], rank=1, group=1)
    assert ostraca.Layout("m", "bf16", number) == ostraca.Layout("m", "bf16", 1)
    assert ostraca.Layout("m", "bf16", number).digest() == ostraca.Layout("m", "bf16", 1).digest()
    with volume.slots(number, lengths=number) as lease:
        assert [slot.nbytes for slot in lease] == [1]
    assert ostraca.ClientSettings(windows_inflight=number) == ostraca.ClientSettings(windows_inflight=1)


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_settings_of_any_type_are_taken_or_refused(value: Any) -> None:
    for name in ostraca.ClientSettings.__dataclass_fields__:
        check_taken_or_refused(partial(ostraca.ClientSettings, **{name: value}))


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_connecting_with_any_argument_is_an_error_of_ostraca_or_a_client(
    fabric: FabricThread, value: Any
) -> None:
    address = fabric.addresses[0]
    acts: list[Callable[[], ostraca.Client]] = [
        lambda: ostraca.connect(value, timeout_s=0.2),
        lambda: ostraca.connect([address, value], settings=SETTINGS, timeout_s=0.2),
        lambda: ostraca.connect(address, settings=SETTINGS, tenant=value, timeout_s=5),
        lambda: ostraca.connect(address, settings=SETTINGS, credentials=value, timeout_s=5),
        lambda: ostraca.connect(address, settings=value, timeout_s=5),
        lambda: ostraca.connect(address, settings=SETTINGS, timeout_s=value),
    ]
    for act in acts:
        try:
            act().close()
        except (ostraca.UsageError, ostraca.ConnectError):
            """Either says what to do."""


def test_a_look_up_of_more_chains_than_one_message_names_is_cut(fabric: FabricThread) -> None:
    with fabric.connect(SETTINGS) as client:
        volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chains = [volume.chain([number.to_bytes(31) + b"m"]) for number in range(20_000)]
        assert volume.lookup(chains, deadline_s=FAR_S).hits == 0
