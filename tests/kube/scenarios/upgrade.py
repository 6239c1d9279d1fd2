"""Rolling upgrade to images of another version, under load, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import helm_python
from tests.kube.images import FIRST_PASSED
from tests.kube.load import Load
from tests.kube.release import HelmRelease
from tests.kube.stage import CHART, Stage
from tests.kube.workers import PodWorker
from tests.support.history import unpack
from tests.support.pod.work import CHAINS

DOCUMENTED = {
    "DEADLINE",
    "DISCONNECTED",
    "DRIVE_ERROR",
    "DRIVE_SUSPECT",
    "NO_OWNER",
    "OVERLOADED",
    "RECOVERING",
    "TOO_SLOW",
}
"""Reasons of misses while an enclosure daemon or a shard owner restarts (docs/explanation/faults.md)."""


def under_load(stage: Stage) -> None:
    """Upgrade and roll back, while workers of two nodes put and get."""
    stage.want_nodes(3)
    stage.cluster.load_images([stage.images.successor.archive])
    values = stage.external_etcd()
    with stage.installed("upgrade", values) as release, ExitStack() as stack:
        workers = [stack.enter_context(stage.worker(release, node)) for node in stage.cluster.nodes[:2]]
        workers[0].put_all(CHAINS)
        with Load(workers) as load:
            release.upgrade({**values, "image": {"tag": stage.images.successor.tag}})
            _check_images(release, stage.images.successor.tag)
            stage.say(f"upgraded to {stage.images.successor.tag}: {load}")
            release.rollback()
            _check_images(release, stage.images.current.tag)
            stage.say(f"rolled back to {stage.images.current.tag}: {load}")
        _check_load(stage, load, workers)


def from_first_chart(stage: Stage) -> None:
    """Upgrade a release of the first chart, under load: agents of both versions work side by side."""
    first = stage.images.first
    if first is None:
        stage.say("skipped: no history of the repository to take the first chart from")
        return
    stage.want_nodes(3)
    stage.cluster.load_images([first.archive])
    source = stage.folder / "first"
    source.mkdir()
    unpack(FIRST_PASSED, ("helm/ostraca",), source)
    chart = Path(helm_python.package(source / "helm/ostraca", destination=source))
    values = stage.external_etcd()
    with (
        stage.installed("from-first", {**values, "image": {"tag": first.tag}}, chart) as release,
        ExitStack() as stack,
    ):
        workers = [stack.enter_context(stage.worker(release, node)) for node in stage.cluster.nodes[:2]]
        workers[0].put_all(CHAINS)
        with Load(workers) as load:
            release.upgrade(values, chart=CHART)
            _check_images(release, stage.images.current.tag)
            stage.say(f"upgraded from the chart of {FIRST_PASSED}: {load}")
        _check_load(stage, load, workers)


def _check_load(stage: Stage, load: Load, workers: Sequence[PodWorker]) -> None:
    for worker in workers:
        back_s = worker.wait_hits([*CHAINS, *load.committed])
    stage.say(f"all of {len(load.committed)} committed chains hit after {back_s:.0f} s, each byte verified")
    unexpected = set(load.reasons) - DOCUMENTED
    assert not unexpected, f"misses for other reasons than documented: {load}"


def _check_images(release: HelmRelease, tag: str) -> None:
    for component in ("agent", "enclosure", "admin"):
        images = {
            container["image"].rpartition(":")[2]
            for pod in release.pods(component)
            if "deletionTimestamp" not in pod["metadata"]
            for container in pod["spec"]["containers"]
        }
        assert images == {tag}, f"{component}: {images}"
