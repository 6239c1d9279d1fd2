"""Rolling upgrade to images of another version, under load, and the way back."""

from __future__ import annotations

from contextlib import ExitStack

from tests.kube.load import Load
from tests.kube.release import HelmRelease
from tests.kube.stage import Stage
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
        unexpected = set(load.reasons) - DOCUMENTED
        assert not unexpected, f"misses for other reasons than documented: {load}"
        for worker in workers:
            lost = worker.missing([*CHAINS, *load.committed])
            assert not lost, f"{len(lost)} of {len(load.committed)} chains are lost: {worker.reasons}"
        stage.say(f"all of {len(load.committed)} committed chains are there, each byte verified")


def _check_images(release: HelmRelease, tag: str) -> None:
    for component in ("agent", "enclosure", "admin"):
        images = {
            container["image"].rpartition(":")[2]
            for pod in release.pods(component)
            for container in pod["spec"]["containers"]
        }
        assert images == {tag}, f"{component}: {images}"
