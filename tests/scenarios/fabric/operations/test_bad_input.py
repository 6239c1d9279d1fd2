"""Bad input against a real fabric: a clear error that says what to do, or the documented result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    LAYOUT,
    MIB,
    SMALL,
    FabricThread,
    content,
    empty,
    hashes,
    volume_of,
)

import ostraca
from ostraca import BlockState, LayoutMismatchError, PutState, UnknownVolumeError, UsageError
from ostraca.settings import ClientSettings
from ostraca_cli.testing import small_plan


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path_factory.mktemp("bad-input") / "fabric")) as started:
        yield started


@pytest.fixture
def client(host: FabricThread) -> Iterator[ostraca.Client]:
    with host.connect() as connected:
        yield connected


@pytest.fixture
def volume(client: ostraca.Client) -> ostraca.Volume:
    return volume_of(client)


def test_an_engine_hash_of_the_wrong_length_is_refused(volume: ostraca.Volume) -> None:
    with pytest.raises(UsageError, match="engine hash 1 has 31 bytes"):
        volume.chain([b"h" * 32, b"h" * 31])


def test_a_block_above_the_volumes_size_is_refused(volume: ostraca.Volume) -> None:
    chain = volume.chain(hashes(1))
    with pytest.raises(UsageError, match=str(BLOCK_BYTES)):
        volume.put(chain, source=content(1, block_bytes=BLOCK_BYTES + 1), deadline_s=1)


def test_memory_with_negative_strides_is_refused(volume: ostraca.Volume) -> None:
    with pytest.raises(UsageError, match="stride"):
        volume.get(volume.chain(hashes(2)), into=empty(2)[:, ::-1], deadline_s=1)


def test_a_read_only_destination_is_refused(volume: ostraca.Volume) -> None:
    into = empty(1)
    into.setflags(write=False)
    with pytest.raises(UsageError, match="read-only"):
        volume.get(volume.chain(hashes(1)), into=into, deadline_s=1)


def test_a_volume_that_is_not_there_is_named(client: ostraca.Client) -> None:
    with pytest.raises(UnknownVolumeError, match=r"no volume 'nowhere'.*create=True"):
        client.volume("nowhere", LAYOUT, block_bytes=BLOCK_BYTES)


def test_another_layout_is_refused_and_the_difference_named(
    client: ostraca.Client, volume: ostraca.Volume
) -> None:
    with pytest.raises(LayoutMismatchError, match="dtype is 'bf16', not 'fp8'"):
        client.volume(volume.name, replace(LAYOUT, dtype="fp8"), block_bytes=BLOCK_BYTES)


def test_another_block_size_is_refused(client: ostraca.Client, volume: ostraca.Volume) -> None:
    with pytest.raises(LayoutMismatchError, match=str(BLOCK_BYTES)):
        client.volume(volume.name, LAYOUT, block_bytes=BLOCK_BYTES // 2, create=True)


@pytest.mark.parametrize("deadline_s", [0, -1.0])
def test_a_deadline_that_has_passed_makes_every_block_late(volume: ostraca.Volume, deadline_s: float) -> None:
    chain = volume.chain(hashes(3))
    assert set(volume.get(chain, into=empty(3), deadline_s=deadline_s).states) == {BlockState.LATE}
    assert set(volume.put(chain, source=content(3), deadline_s=deadline_s).states) == {PutState.LATE}
    assert set(volume.lookup(chain, deadline_s=deadline_s).states) == {BlockState.LATE}


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), 1e9])
def test_a_deadline_that_is_no_time_is_refused(volume: ostraca.Volume, deadline_s: float) -> None:
    with pytest.raises(UsageError, match="deadline_s"):
        volume.get(volume.chain(hashes(1)), into=empty(1), deadline_s=deadline_s)


def test_an_empty_batch_has_an_empty_result(volume: ostraca.Volume) -> None:
    chain = volume.chain([])
    assert volume.get(chain, into=empty(0), deadline_s=1).states == ()
    assert volume.put(chain, source=content(0), deadline_s=1).states == ()
    assert volume.lookup(chain, deadline_s=1).prefix == 0


def test_a_batch_over_the_limit_is_refused(host: FabricThread) -> None:
    settings = replace(SMALL, batch_blocks_max=4)
    with host.connect(settings) as client:
        volume = volume_of(client)
        with pytest.raises(UsageError, match=r"5 blocks.*4"):
            volume.lookup(volume.chain(hashes(5)), deadline_s=1)


def test_a_batch_larger_than_arena_and_request_is_moved_in_parts(host: FabricThread) -> None:
    settings = ClientSettings(arena_bytes=4 * MIB, chunk_bytes=4 * MIB, transports=("inline",))
    with host.connect(settings) as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(100, seed=5))
        assert (
            volume.put(chain, source=content(100, 5), deadline_s=30, ack=ostraca.Ack.COMMITTED).accepted
            == 100
        )
        into = empty(100)
        assert volume.get(chain, into=into, deadline_s=30).prefix == 100
        assert np.array_equal(into, content(100, 5))


def test_a_client_taken_across_a_fork_says_so(host: FabricThread) -> None:
    script = f"""
import os, sys, warnings
import ostraca
from ostraca.settings import ClientSettings
client = ostraca.connect({host.addresses[0]!r}, settings=ClientSettings(transports=("inline",)))
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    try:
        client.status()
    except ostraca.ClosedError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done
    assert "fork" in done.stderr + done.stdout


def test_nobody_listening_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ostraca.ConnectError, match="agent"):
        ostraca.connect(f"unix://{tmp_path}/nobody.sock")
