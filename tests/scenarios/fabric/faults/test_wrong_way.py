"""Invariant 1 against the data plane itself: a transport that does wrong makes misses, never wrong bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scenarios.soak.traffic import BLOCK_BYTES, LAYOUT, RegionTraffic, Tally, Traffic
from tests.support.fabric.fabric_host import MIB, FabricThread
from tests.support.fabric.worker_host import drives_beside
from tests.support.simulated.wrong_way import Harm, WrongWayTransport

from ostraca.settings import ClientSettings
from ostraca_cli.testing import small_plan
from ostraca_fabric.nixl import runtime
from ostraca_fabric.ports.transport import Transport

pytestmark = pytest.mark.slow

SEEDS = range(1, 20) if "OSTRACA_EVERY_CELL" in os.environ else (1,)
MIXTURE: list[Harm] = [harm for harm in Harm if harm is not Harm.STUCK]
"""What is stuck holds its memory, and with enough of it nothing moves any more, right or wrong."""

DIRECT_TENANT = "default"
WORKERS = 3
STEPS = 30
BLOCKS = 48
MIXES_MAX = 5
"""Mixes until a transfer lands late, which some three do in one."""


TIGHT = ClientSettings(
    arena_bytes=4 * MIB, chunk_bytes=2 * MIB, quarantine_bytes_max=3 * MIB, direct_memory=False
)
"""An arena of some thirty slots: every slot is used again and again."""


@contextmanager
def wronged(
    directory: Path,
    harms: list[Harm],
    *,
    seed: int,
    share: float,
    transport: str = "inline",
    direct_reads_tenant: str = "",
) -> Iterator[tuple[FabricThread, WrongWayTransport]]:
    made: list[WrongWayTransport] = []

    def wrap(inner: Transport) -> Transport:
        made.append(WrongWayTransport(inner, harms, seed=seed, share=share))
        return made[-1]

    plan = replace(small_plan(directory / "fabric"), dram_bytes=2 * MIB, transports=(transport,))
    plan = replace(plan, direct_reads_tenant=direct_reads_tenant)
    with FabricThread(plan, wrap=wrap) as host:
        try:
            yield host, made[0]
        finally:
            host.call_soon(made[0].relent)


def mix(
    host: FabricThread,
    *,
    seed: int,
    transport: str = "inline",
    drives: tuple[str, ...] = (),
    has_regions: bool = False,
) -> Tally:
    """Let workers of two tenants put and get for a while; return what became of it.

    With *drives*, workers of one tenant read those themselves. With *has_regions*, blocks move in place.
    """
    whole = Tally()
    settings = replace(TIGHT, transports=(transport,), direct_drives=drives)

    def work(number: int) -> Tally:
        with host.connect(settings, tenant=DIRECT_TENANT if drives else f"tenant-{number % 2}") as client:
            volumes = [
                client.volume(name, LAYOUT, block_bytes=BLOCK_BYTES, create=True) for name in ("a", "b")
            ]
            traffic = (
                RegionTraffic(client, volumes, seed=seed * 100 + number, blocks=BLOCKS)
                if has_regions
                else Traffic(volumes, seed=seed * 100 + number, blocks=BLOCKS)
            )
            for _ in range(STEPS):
                traffic.step()
            return traffic.tally

    with ThreadPoolExecutor(WORKERS) as threads:
        for tally in threads.map(work, range(WORKERS)):
            whole.add(tally)
    assert sum(whole.operations.values()) == WORKERS * STEPS, whole
    return whole


def mix_until_late(
    host: FabricThread, way: WrongWayTransport, *, seed: int, transport: str = "inline", has_regions: bool
) -> Tally:
    """Mix until a transfer has landed late: threads decide which transfer gets which throw of the dice."""
    whole = Tally()
    for more in range(MIXES_MAX):
        whole.add(mix(host, seed=seed + more, transport=transport, has_regions=has_regions))
        if way.landed_late:
            break
    assert way.landed_late > 0
    return whole


@pytest.mark.parametrize("harm", list(Harm), ids=lambda harm: harm.name.lower().replace("_", " "))
def test_whatever_befalls_transfers_nothing_wrong_is_handed_over(tmp_path: Path, harm: Harm) -> None:
    share = 0.05 if harm is Harm.STUCK else 0.4  # what is stuck holds its memory, and later waves wait for it
    with wronged(tmp_path, [harm], seed=1, share=share) as (host, way):
        tally = mix(host, seed=1)
        assert tally.wrong == []
        assert way.counts[harm] > 0
        assert tally.verified > 0, "and some blocks come through all the same"
        if harm in (Harm.LOST, Harm.DUPLICATED):
            assert way.landed_late > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_wrong_is_handed_over_when_everything_befalls_transfers(tmp_path: Path, seed: int) -> None:
    with wronged(tmp_path, MIXTURE, seed=seed, share=0.3) as (host, way):
        tally = mix(host, seed=seed)
        assert tally.wrong == []
        assert tally.verified > 0
        assert len(way.counts) > 1, "the dice were thrown"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_lands_wrong_or_late_in_rows_of_regions(tmp_path: Path, seed: int) -> None:
    """Rows are used again and again, and hold poison in between."""
    with wronged(tmp_path, MIXTURE, seed=seed, share=0.3) as (host, way):
        tally = mix_until_late(host, way, seed=seed, has_regions=True)
        assert tally.wrong == []
        assert tally.verified > 0
        assert tally.errors == {}


@pytest.mark.nixl
@pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed")
@pytest.mark.parametrize("has_regions", [False, True], ids=["arena", "rows"])
def test_nor_over_nixl(tmp_path: Path, *, has_regions: bool) -> None:
    with wronged(tmp_path, MIXTURE, seed=5, share=0.3, transport="nixl") as (host, way):
        tally = mix_until_late(host, way, seed=5, transport="nixl", has_regions=has_regions)
        assert tally.wrong == []
        assert tally.verified > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("has_regions", [False, True], ids=["arena", "rows"])
def test_nor_beside_blocks_that_workers_read_themselves(
    tmp_path: Path, seed: int, *, has_regions: bool
) -> None:
    """Waves into memory that direct reads use before and after: of blocks from the cache, and of puts."""
    with wronged(tmp_path, MIXTURE, seed=seed, share=0.3, direct_reads_tenant=DIRECT_TENANT) as (host, way):
        tally = mix(host, seed=seed, drives=(drives_beside(host.addresses),), has_regions=has_regions)
        assert tally.wrong == []
        assert tally.verified > 0
        assert len(way.counts) > 1, "the dice were thrown"
        (status,) = host.status()
        assert status.counters.get_hits_direct > 0


def test_once_transfers_go_right_again_so_does_everything(tmp_path: Path) -> None:
    with wronged(tmp_path, MIXTURE, seed=7, share=0.5) as (host, way):
        mix(host, seed=7)
        host.call_soon(way.relent)
        tally = mix(host, seed=8)
        assert tally.wrong == []
        assert tally.verified > 0
        assert tally.errors == {}
        assert all(status.quarantined_bytes == 0 for status in host.status())
