"""Operations of a connector on a real fabric, for an engine with keys and values in separate memory."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.support.fabric.fabric_host import FabricThread

from ostraca.connectors.kv_identity.chains import Run, chain_after
from ostraca.connectors.kv_identity.identity import GroupIdentity, KvIdentity
from ostraca.connectors.transfers.counters import LOAD_BYTES
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.jobs import RowJob, TransferJob
from ostraca.connectors.transfers.operations import Answer, FabricOperations
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca_cli.testing import small_plan

LAYERS, ROWS, PART_BYTES = 4, 16, 4096
PATIENCE_S = 20.0
KEYS = [hashlib.sha256(f"{number}".encode()).digest() for number in range(6)]


class LayerRows:
    """Memory with the layer first, and keys apart from values: no row is contiguous."""

    row_bytes = 2 * LAYERS * PART_BYTES

    def __init__(self) -> None:
        self.keys = np.zeros((LAYERS, ROWS, PART_BYTES), np.uint8)
        self.values = np.zeros_like(self.keys)

    def blocks(self, rows: Sequence[int]) -> list[list[NDArray[np.uint8]]]:
        return [[self.keys[:, row], self.values[:, row]] for row in rows]


class Engine:
    """An engine with the shared parts of connectors and nothing else."""

    def __init__(self, address: str) -> None:
        settings = ConnectorSettings.of(
            {"agents": address, "arena_bytes": 32 << 20, "transports": ["inline"], "lookup_deadline_s": 5.0}
        )
        identity = KvIdentity(
            model="m", dtype="bf16", groups=(GroupIdentity(0, 16, ("l",)),), block_bytes=LayerRows.row_bytes
        )
        self.rows = LayerRows()
        self.link = FabricLink(settings, block_bytes=LayerRows.row_bytes, layout=identity.layout())
        self.operations = FabricOperations(
            self.link, settings, self.rows, tokens_per_chunk={0: 16}, clock_s=time.monotonic
        )
        until_s = time.monotonic() + PATIENCE_S
        while self.link.volume() is None:
            assert time.monotonic() < until_s
            threading.Event().wait(0.001)

    def finish(self) -> TransferJob:
        self.operations.drain()
        (job,) = self.operations.poll().jobs
        return job

    def answers(self, run: Run) -> list[Answer]:
        assert self.operations.submit_lookup([run])
        until_s = time.monotonic() + PATIENCE_S
        while not (answers := self.operations.poll().answers):
            assert time.monotonic() < until_s
            threading.Event().wait(0.001)
        return answers


def test_chunks_of_scattered_parts_travel_between_engines(tmp_path: Path) -> None:
    run = Run(chain_after(KEYS[:2], KEYS[2:]), tuple(KEYS[2:]))
    with FabricThread(small_plan(tmp_path / "fabric")) as fabric:
        writer, reader = Engine(fabric.addresses[0]), Engine(fabric.addresses[0])
        dice = np.random.default_rng(0)
        for part in (writer.rows.keys, writer.rows.values):
            part[...] = dice.integers(0, 256, part.shape, np.uint8)
        writer.operations.store(RowJob(1, "w", run.keys, (0, 1, 2, 3)), [run], [])
        assert writer.operations.has_work
        assert writer.finish().succeeded == run.keys
        until_s = time.monotonic() + PATIENCE_S
        while reader.answers(run) != [(key, True) for key in run.keys]:
            assert time.monotonic() < until_s
        reader.operations.load(RowJob(2, "r", (*run.keys, KEYS[0]), (8, 9, 7, 6, 5)), [run], [KEYS[0]])
        loaded = reader.finish()
        assert (loaded.succeeded, loaded.failed) == (run.keys, (KEYS[0],))
        for mine, theirs in ((reader.rows.keys, writer.rows.keys), (reader.rows.values, writer.rows.values)):
            assert np.array_equal(mine[:, [8, 9, 7, 6]], theirs[:, :4])
            assert not mine[:, 5].any()
        assert reader.operations.counters.total[LOAD_BYTES, ""] == 4 * LayerRows.row_bytes
        assert not reader.operations.has_work
        for engine in (writer, reader):
            engine.link.close()


def test_a_drain_waits_also_in_a_process_with_many_open_files(tmp_path: Path) -> None:
    run = Run(chain_after([], KEYS), tuple(KEYS))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.dup(1)]
    try:
        while many[-1] < 1024:
            many.append(os.dup(1))
        with FabricThread(small_plan(tmp_path / "fabric")) as fabric:
            engine = Engine(fabric.addresses[0])
            engine.operations.store(RowJob(1, "w", run.keys, tuple(range(6))), [run], [])
            assert engine.finish().succeeded == run.keys
            engine.operations.close()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
