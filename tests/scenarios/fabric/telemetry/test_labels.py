"""The log lines of one request carry one label, from the SDK to the drive."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fabric.fabric_host import MIB, FabricThread, content, drive_files, empty, hashes, volume_of

from ostraca import Ack, BlockState, Reason
from ostraca_cli.testing import small_plan
from ostraca_fabric.telemetry.log_lines import LabelFilter

BLOCKS = 5
LOGGERS = ("ostraca", "ostraca_fabric", "ostraca_dpu_agent")


class Lines(logging.Handler):
    """Keeps what `ostraca up --verbose` and a worker's own log would show."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.addFilter(LabelFilter())
        self.setFormatter(logging.Formatter("%(name)s %(label)s%(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def of(self, label: str) -> list[str]:
        return [line for line in self.lines if label in line.replace("[", " ").replace("]", " ").split()]


@pytest.fixture
def log() -> Iterator[Lines]:
    handler = Lines()
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler
    for name, level in levels.items():
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FabricThread]:
    with FabricThread(small_plan(tmp_path / "fabric")) as started:
        yield started


def in_order(lines: list[str], *wanted: str) -> None:
    """Each of *wanted* is part of a line, the lines in this order."""
    rest = iter(lines)
    for words in wanted:
        assert any(words in line for line in rest), f"{words!r} is not among, or not in its place:\n{lines}"


def test_a_get_is_followed_through_sdk_data_path_owner_and_failing_drive_by_one_label(
    host: FabricThread, log: Lines
) -> None:
    with host.connect() as client:
        volume = volume_of(client)
        chain = volume.chain(hashes(BLOCKS))
        volume.put(chain, source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        for path in drive_files(host.plan):
            os.truncate(path, MIB)
        log.lines.clear()
        told = volume.get(chain, into=empty(BLOCKS), deadline_s=10)
        assert set(zip(told.states, told.reasons, strict=True)) == {(BlockState.MISS, Reason.DRIVE_ERROR)}
        labels = {line.split()[1] for line in log.lines if " sent: get of 5 blocks" in line}
    (label,) = labels
    assert label.startswith(f"{client.worker}/")
    lines = log.of(label)
    in_order(
        lines,
        f"ostraca {label} sent: get of 5 blocks",
        "ostraca_dpu_agent.datapath.data_path",
        "ostraca_dpu_agent.shards.service",
        "file_drive",
        "has failed",
        "get answered after",
        f"ostraca {label} finished after",
    )
    assert lines[-1].endswith("ms: 5 MISS (5 DRIVE_ERROR)")
    assert sum("5 of 5 blocks found" in line for line in lines) == 1


def test_a_put_takes_its_label_to_the_owner_and_two_requests_never_share_one(
    host: FabricThread, log: Lines
) -> None:
    with host.connect() as first, host.connect() as second:
        for number, client in enumerate((first, second)):
            volume = volume_of(client)
            chain = volume.chain(hashes(BLOCKS, seed=number))
            volume.put(chain, source=content(BLOCKS), deadline_s=10, ack=Ack.COMMITTED)
        labels = [line.split()[1] for line in log.lines if " sent: put of 5 blocks" in line]
    assert len(set(labels)) == len(labels) == 2
    for label in labels:
        in_order(
            log.of(label),
            "sent: put",
            "put of 5 blocks begins",
            "reserved: 5 STAGED",
            "committed: 5 COMMITTED",
            "finished",
        )


def test_lines_of_no_request_have_no_label(host: FabricThread, log: Lines) -> None:
    logging.getLogger("ostraca_dpu_agent").info("nothing in particular")
    assert "ostraca_dpu_agent nothing in particular" in log.lines
