"""Common ground of all scenarios: cluster, chart, images and progress lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kube.cluster import addresses
from tests.kube.cluster.cluster import Cluster
from tests.kube.cluster.node import Node
from tests.kube.images import ClusterImages
from tests.kube.release import HelmRelease
from tests.kube.workers import PodWorker

CHART = Path(__file__).parents[2] / "helm/ostraca"

TRIAL: Mapping[str, Any] = {"etcd": {"trial": {"enabled": True}}, "enclosure": {"files": {"enabled": True}}}
"""Values of the trial."""


@dataclass
class Stage:
    """Cluster with its images, for one run."""

    cluster: Cluster
    images: ClusterImages
    folder: Path
    """Folder for files of scenarios; removed after the run."""

    etcd: str = f"{addresses.CONTROL_PLANE}:2379"
    """Address of an etcd outside of the nodes, as pods and nodes reach it."""

    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a progress line."""
        print(f"{time.monotonic() - self.began_s:7.1f} s  {text}", flush=True)

    def want_nodes(self, count: int) -> None:
        """Add nodes until there are so many."""
        missing = count - len(self.cluster.nodes)
        if missing > 0:
            self.cluster.add_nodes(missing)
            self.say(f"{count} nodes are Ready")

    def external_etcd(self) -> dict[str, Any]:
        """Return values for drives that are files, and an etcd outside of the nodes.

        Agents have no DRAM cache, so that every get reads flash.
        """
        return {
            "etcd": {"endpoints": [self.etcd]},
            "enclosure": {"files": {"enabled": True}},
            "agent": {"settings": {"memory": {"cache_bytes": 0}}},
        }

    @contextmanager
    def installed(
        self, name: str, values: Mapping[str, Any], chart: Path = CHART, *, ends_in_order: bool = False
    ) -> Iterator[HelmRelease]:
        """Install a release, and remove it after success; a failed release stays for its description.

        *ends_in_order*: uninstall and wait as a user would. Otherwise the pods are killed, to save time.
        """
        release = HelmRelease(chart, self.cluster.kubectl, name)
        release.install(values)
        self.say(f"release {name} is installed and ready")
        yield release
        if ends_in_order:
            release.uninstall()
            self.say(f"release {name} is uninstalled")
        else:
            release.discard()
            for node in self.cluster.nodes:
                node.remove(name)  # drives of all scenarios together would fill a disk
            self.say(f"release {name} is discarded")

    def worker(self, release: HelmRelease, node: Node) -> PodWorker:
        """Return a worker for a node."""
        return PodWorker(release, node, f"ostraca-worker:{self.images.current.tag}")


Scenario = Callable[[Stage], None]
