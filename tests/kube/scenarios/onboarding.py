"""Onboarding of an enclosure from the values of a release."""

from __future__ import annotations

from tests.kube.cluster.processes import wait_until
from tests.kube.shelf import Shelf
from tests.kube.stage import Stage
from tests.support.pod.work import CHAINS

_ACTIVE_S = 120.0


def from_values(stage: Stage) -> None:
    """Add an enclosure by an upgrade, twice; its drives serve blocks."""
    stage.want_nodes(3)
    name = "onboarding"
    values = stage.external_etcd()
    prefix = f"/ostraca/{name}/{name}/"
    with (
        stage.installed(name, values) as release,
        Shelf("shelf-1", stage.folder / "shelf", etcd=stage.etcd, prefix=prefix) as shelf,
    ):
        with_shelf = {**values, "enclosures": [{"name": shelf.name, "controllers": [shelf.controller]}]}
        for attempt in ("first", "second"):
            release.upgrade(with_shelf)
            report = release.kubectl.run("logs", f"job/{name}-registration", "--container=list")
            lines = [line for line in report.splitlines() if shelf.name in line]
            assert lines, f"{shelf.name} is not in the list of enclosures:\n{report}"
            stage.say(f"{attempt} registration: {' '.join(lines[0].split())}")
        formatted = shelf.written_bytes()
        with stage.worker(release, stage.cluster.nodes[0]) as worker:
            wait_until(lambda: worker.put(CHAINS) == list(CHAINS), _ACTIVE_S, "puts")
            assert worker.missing(CHAINS) == []
        written = shelf.written_bytes() - formatted
        assert written > 0, f"no block reached {shelf.name}"
        stage.say(f"{shelf.name} holds {written >> 10} KiB of blocks")
