"""Workers that read drives themselves, in a whole fabric."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.scenarios.soak.traffic import LAYOUT as SOAK_LAYOUT
from tests.scenarios.soak.traffic import Tally, Traffic
from tests.sdk.direct.stand_in_kvikio import kvikio_installed
from tests.sdk.memory.stand_in_devices import DeviceArray, StandInDevices
from tests.support.fabric.fabric_host import (
    BLOCK_BYTES,
    MIB,
    SMALL,
    FabricThread,
    content,
    drive_files,
    empty,
    fill_with_noise,
    find_on_flash,
    hashes,
    overwrite,
    volume_of,
)
from tests.support.fabric.worker_host import blocks_read, drives_beside

import ostraca
from ostraca import Ack, BlockState, PutState, Reason
from ostraca_cli.composition.embedded import FabricPlan
from ostraca_cli.program import main
from ostraca_cli.testing import small_plan

BLOCKS = 32
DEADLINE_S = 20.0
HIT = BlockState.HIT


def plan_of(directory: Path) -> FabricPlan:
    return replace(small_plan(directory / "fabric"), direct_reads_tenant="default")


@contextmanager
def direct_client(
    host: FabricThread, drives: Path | None = None, settings: ostraca.ClientSettings = SMALL
) -> Iterator[ostraca.Client]:
    """Connect a client that reads drives itself: all of the fabric, or *drives*."""
    pattern = drives_beside(host.addresses) if drives is None else str(drives)
    with host.connect(replace(settings, direct_drives=(pattern,))) as client:
        yield client


def put(client: ostraca.Client, seed: int) -> None:
    volume = volume_of(client)
    chain = volume.chain(hashes(BLOCKS, seed), is_chained=False)
    found = volume.put(chain, source=content(BLOCKS, seed), deadline_s=DEADLINE_S, ack=Ack.COMMITTED)
    assert set(found.states) == {PutState.COMMITTED}, found


def get(client: ostraca.Client, *seeds: int, on_device: bool = False) -> ostraca.GetResult:
    """Get blocks of several puts, and check that hits are right and nothing else was touched."""
    volume = volume_of(client)
    chain = volume.chain([each for seed in seeds for each in hashes(BLOCKS, seed)], is_chained=False)
    into: NDArray[np.uint8] = empty(len(seeds) * BLOCKS)
    found = volume.get(chain, into=DeviceArray(into) if on_device else into, deadline_s=DEADLINE_S)
    right = np.concatenate([content(BLOCKS, seed) for seed in seeds])
    is_hit = np.array(found.states) == HIT
    assert np.array_equal(into, np.where(is_hit[:, None], right, empty(len(into))))
    return found


def hits_direct(host: FabricThread) -> int:
    return sum(status.counters.get_hits_direct for status in host.status())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(plan_of(tmp_path)) as started:
        yield started


def test_blocks_from_flash_and_blocks_of_the_cache_come_in_one_get(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), dram_bytes=64 * MIB)
    with FabricThread(plan) as host, host.connect() as writer:
        put(writer, 1)
    with FabricThread(plan) as host, host.connect() as writer, direct_client(host) as client:
        put(writer, 2)
        assert set(get(client, 1, 2).states) == {HIT}
        (status,) = host.status()
        assert (status.counters.get_hits_direct, status.counters.get_hits_from_cache) == (BLOCKS, BLOCKS)
        assert blocks_read(client) == BLOCKS
        with volume_of(client).get_views(
            volume_of(client).chain(hashes(BLOCKS, 1), is_chained=False),
            lengths=BLOCK_BYTES,
            deadline_s=DEADLINE_S,
        ) as views:
            assert all(view == right.data for view, right in zip(views, content(BLOCKS, 1), strict=True))
        assert blocks_read(client) == 2 * BLOCKS, "blocks read directly do not enter the cache"


@pytest.mark.slow
@pytest.mark.parametrize("dram_bytes", [0, 4 * MIB])
def test_a_worker_reads_only_right_bytes_while_blocks_are_evicted(tmp_path: Path, dram_bytes: int) -> None:
    check_while_evicted(tmp_path, dram_bytes)


@pytest.mark.slow
def test_a_worker_reads_only_right_bytes_into_a_device_while_blocks_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = StandInDevices(tagged_bytes_min=241)
    monkeypatch.setattr("ostraca.client.CudaDevices", lambda *, gpu_tags: devices if gpu_tags else None)
    with kvikio_installed(monkeypatch) as library:
        check_while_evicted(tmp_path, 0, replace(SMALL, gpu_tags=True, gpu_reads=True))
        assert sum(length for _, length in library.reads) > BLOCKS * BLOCK_BYTES
        assert not devices.stagings


def check_while_evicted(tmp_path: Path, dram_bytes: int, settings: ostraca.ClientSettings = SMALL) -> None:
    """Read in a full fabric: each put evicts, and the space of evicted blocks is written again at once."""
    plan = replace(plan_of(tmp_path), drives=1, capacity_bytes=(3 * 64 + 1) * MIB, dram_bytes=dram_bytes)
    first, rounds = 1000, 2 * plan.capacity_bytes // (BLOCKS * BLOCK_BYTES)
    put_until, is_over = [first], threading.Event()

    def write(host: FabricThread) -> None:
        try:
            with host.connect() as writer:
                for seed in range(first, first + rounds):
                    put(writer, seed)
                    put_until[0] = seed + 1
        finally:
            is_over.set()

    with FabricThread(plan) as host, direct_client(host, settings=settings) as client:
        writing = threading.Thread(target=write, args=(host,))
        writing.start()
        dice, hits, misses = np.random.default_rng(1), 0, 0
        while not is_over.is_set():
            # The oldest blocks are about to be evicted, or have just been.
            newest = put_until[0]
            for seed in {newest - 1, newest - int(dice.integers(1, 26)), newest - 22}:
                if seed >= first:
                    found = get(client, seed, on_device=settings.gpu_reads)
                    hits += found.hits
                    misses += BLOCKS - found.hits
        writing.join()
        assert put_until[0] == first + rounds, "every put was stored"
        assert sum(shard.evicted_blocks for status in host.status() for shard in status.shards) > 0
        assert blocks_read(client) > BLOCKS
        assert hits > 0
        assert misses > 0, "and some were evicted"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_direct_workers_over_a_tiny_arena_get_only_what_was_put(tmp_path: Path, seed: int) -> None:
    plan = replace(plan_of(tmp_path), drives=1, capacity_bytes=(3 * 64 + 1) * MIB, dram_bytes=2 * MIB)
    whole, lock = Tally(), threading.Lock()
    tight = replace(SMALL, arena_bytes=4 * MIB, chunk_bytes=2 * MIB, quarantine_bytes_max=3 * MIB)

    def work(host: FabricThread, number: int) -> None:
        settings = replace(tight, direct_drives=(drives_beside(host.addresses),))
        with host.connect(settings) as client:
            volumes = [
                client.volume(name, SOAK_LAYOUT, block_bytes=128 << 10, create=True) for name in ("a", "b")
            ]
            traffic = Traffic(volumes, seed=seed * 100 + number, blocks=200)
            for _ in range(150):
                traffic.step()
            with lock:
                whole.add(traffic.tally)

    with FabricThread(plan) as host:
        threads = [threading.Thread(target=work, args=(host, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hits_direct(host) > 0
    assert sum(whole.operations.values()) == 3 * 150
    assert (whole.wrong, dict(whole.errors)) == ([], {})
    assert whole.verified > 0


def test_a_worker_with_one_of_the_drives_gets_the_others_blocks_from_agents(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path), agents=2, enclosures=2, drives=1)
    with FabricThread(plan) as host, host.connect() as writer:
        put(writer, 1)
        read = []
        for path in drive_files(plan):
            before = hits_direct(host)
            with direct_client(host, path) as client:
                assert set(get(client, 1).states) == {HIT}
                read.append(blocks_read(client))
            assert hits_direct(host) - before == read[-1]
        assert all(read)
        assert sum(read) == BLOCKS


@pytest.mark.parametrize("is_new_file", [True, False])
def test_a_drive_that_is_overwritten_under_a_worker_gives_no_wrong_byte(
    host: FabricThread, *, is_new_file: bool
) -> None:
    with direct_client(host) as client:
        put(client, 1)
        assert set(get(client, 1).states) == {HIT}
        assert blocks_read(client) == BLOCKS
        wanted, is_over, results = content(BLOCKS, 1), threading.Event(), list[ostraca.GetResult]()

        def read() -> None:
            while not is_over.is_set():
                results.append(get(client, 1))

        reading = threading.Thread(target=read)
        reading.start()
        try:
            if is_new_file:
                for path in drive_files(host.plan):
                    other = path.with_suffix(".other")
                    other.write_bytes(os.urandom(MIB))
                    os.truncate(other, path.stat().st_size)
                    other.rename(path)
            else:
                places = [find_on_flash(host.plan, block) for block in wanted[:2]]
                for place, block in zip(places, wanted[1::-1], strict=True):
                    overwrite(*place, block.tobytes())
                fill_with_noise(host.plan.directory)
        finally:
            is_over.set()
            reading.join()
        assert results
        last = get(client, 1)
        if is_new_file:
            assert set(last.states) == {HIT}, "both ends hold the old files"
        else:
            assert set(last.states) == {BlockState.MISS}
            assert set(last.reasons) <= {Reason.DAMAGED, Reason.NOT_FOUND}


def test_what_lies_elsewhere_on_a_stale_copy_of_a_drive_comes_from_the_agent(
    host: FabricThread, tmp_path: Path
) -> None:
    (tmp_path / "copies").mkdir()
    for number, path in enumerate(drive_files(host.plan)):
        copy = tmp_path / "copies" / f"drive-{number}.img"
        with path.open("rb") as file:
            copy.write_bytes(file.read(MIB))
        os.truncate(copy, path.stat().st_size)
    with direct_client(host, tmp_path / "copies" / "*.img") as client:
        put(client, 1)
        assert set(get(client, 1).states) == {HIT}
        direct = client.metrics().direct
        assert direct is not None
        assert (direct.blocks_read, direct.blocks_failed) == (0, BLOCKS), "refused by their tags"
        assert set(get(client, 1).states) == {HIT}
        assert client.metrics().direct == direct, "the copy is read no more for a while"
        assert hits_direct(host) == 0


def test_status_shows_what_was_read_directly(host: FabricThread, capsys: pytest.CaptureFixture[str]) -> None:
    with direct_client(host) as client:
        put(client, 1)
        assert set(get(client, 1).states) == {HIT}
        assert main(["status", *host.addresses]) == 0
    lines = capsys.readouterr().out.splitlines()
    (titles,) = (number for number, line in enumerate(lines) if " direct " in line)
    end = lines[titles].index(" direct ") + len(" direct")
    assert lines[titles + 1][:end].split()[-1] == str(BLOCKS)


def test_a_second_tenant_is_refused(host: FabricThread) -> None:
    with direct_client(host) as client:
        put(client, 1)
        refused = pytest.raises(ostraca.OstracaError, match="can't be added while workers of tenant default")
        with host.connect(tenant="second") as stranger, refused:
            volume_of(stranger)
        assert set(get(client, 1).states) == {HIT}
        assert blocks_read(client) == BLOCKS
