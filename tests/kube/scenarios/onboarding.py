"""Onboarding of an enclosure from the values of a release."""

from __future__ import annotations

from tests.kube.shelf import Shelf
from tests.kube.stage import Stage

_CHAINS = range(200)
"""So many that some lie on each enclosure: chains are placed at random."""


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
            stage.say(f"{attempt} registration of {shelf.name} is done")
        formatted = shelf.written_bytes()
        with stage.worker(release, stage.cluster.nodes[0]) as worker:
            worker.put_all(_CHAINS)
            worker.wait_hits(_CHAINS)
        written = shelf.written_bytes() - formatted
        assert written > 0, f"no block reached {shelf.name}"
        stage.say(f"{shelf.name} holds {written >> 10} KiB of blocks")
