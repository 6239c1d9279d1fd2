"""What the SDK's tests share: an agent by script, and a client of it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.sdk.connection.tls_front import HOST, TlsFront
from tests.sdk.front_ends import FRONT_ENDS
from tests.sdk.scripted_agent import ScriptedAgent, agent_at

import ostraca
from ostraca_fabric.sockets.tls import TlsFiles

MIB = 1 << 20
BLOCK_BYTES = 64 << 10
SOON_S = 0.3
"""A deadline that comes, but not before the agent was asked."""

LAYOUT = ostraca.Layout(
    model="test/model",
    dtype="bf16",
    page_tokens=16,
    groups=(ostraca.KvGroup(8, 8, 128),) * 2,
    tensor_parallel=2,
)
SETTINGS = ostraca.ClientSettings(
    arena_bytes=4 * MIB,
    chunk_bytes=MIB,
    transports=("inline",),
    quarantine_bytes_max=2 * MIB,
    batch_blocks_max=512,
    put_window_bytes=MIB,
    redial_s=0.01,
)


def hashes(count: int, seed: str = "prompt") -> list[bytes]:
    """Engine hashes of a prefix."""
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(count)]


@contextmanager
def no_thread_to_be_had(*names: str) -> Iterator[None]:
    """Refuse threads of these names, as the kernel does where a process has as many as it may."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ScriptedAgent]:
    with agent_at(tmp_path / "agent.sock") as running:
        yield running


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="session")
def agent_files(authority: Authority) -> TlsFiles:
    """Return the certificate of an agent at ``tls_front.HOST``."""
    return authority.files("agent-1", HOST)


@pytest.fixture
def way() -> str:
    """How the client goes to the agent: over unix, or tls."""
    return "unix"


@pytest.fixture
def client(agent: ScriptedAgent, way: str, request: pytest.FixtureRequest) -> Iterator[ostraca.Client]:
    if way == "unix":
        with ostraca.connect(agent.address, settings=SETTINGS) as connected:
            yield connected
        return
    files: TlsFiles = request.getfixturevalue("agent_files")
    settings = replace(SETTINGS, tls_ca=str(files.ca))
    path = Path(agent.address.removeprefix("unix://"))
    with TlsFront(path, files) as front, ostraca.connect(front.address, settings=settings) as connected:
        yield connected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whoever uses ``volume`` is a behaviour of all front ends, and of one of them over TLS."""
    if "volume" in metafunc.fixturenames:
        ways = [pytest.param(front_end, "unix", id=front_end) for front_end in sorted(FRONT_ENDS)]
        ways.append(pytest.param("blocking", "tls", id="blocking-tls"))
        metafunc.parametrize(("front_end", "way"), ways)


@pytest.fixture
def volume(client: ostraca.Client, front_end: str) -> Iterator[ostraca.Volume]:
    """Return a volume in one of the front ends."""
    opened = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
    with FRONT_ENDS[front_end](client, opened) as behind:
        yield behind
