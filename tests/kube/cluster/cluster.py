"""A Kubernetes cluster of several nodes on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.kube.cluster import addresses
from tests.kube.cluster.control_plane import ControlPlane
from tests.kube.cluster.credentials import Credentials
from tests.kube.cluster.kubectl import Kubectl
from tests.kube.cluster.node import Node
from tests.kube.cluster.processes import run, wait_until

_READY_S = 180.0


class Cluster:
    """Control plane and nodes. Use as a context manager, in namespaces of a run."""

    def __init__(self, programs: Path, folder: Path, cgroup: str) -> None:
        self._programs = programs
        self._folder = folder
        self._cgroup = cgroup
        self._stack = ExitStack()
        self._images: list[Path] = []
        self._credentials = Credentials(folder / "credentials")
        self._control_plane = ControlPlane(programs, folder, self._credentials)
        self.nodes: list[Node] = []
        self.kubectl = Kubectl(self._credentials.kubeconfig("admin"))

    def __enter__(self) -> Self:
        """Start the control plane; nodes are added later."""
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", addresses.BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{addresses.CONTROL_PLANE}/24", "dev", addresses.BRIDGE)
        run("ip", "link", "set", addresses.BRIDGE, "up")
        self._stack.callback(self._power_off)
        self._stack.enter_context(self._control_plane)
        return self

    def __exit__(self, *_: object) -> None:
        """Switch all nodes off and end the control plane."""
        self._stack.close()

    def add_nodes(self, count: int) -> list[Node]:
        """Add nodes with all images; return when the nodes are Ready."""
        added = [self._node(len(self.nodes) + 1 + offset) for offset in range(count)]
        self.nodes += added
        for node in added:
            node.boot()
        self._load(added, self._images)
        self.wait_ready(added)
        return added

    def load_images(self, archives: Sequence[Path]) -> None:
        """Import new archives of images into all nodes, and into all nodes of later."""
        new = [archive for archive in archives if archive not in self._images]
        self._images += new
        self._load(self.nodes, new)

    def wait_ready(self, nodes: Sequence[Node]) -> float:
        """Wait until nodes are Ready; return the seconds."""
        names = {node.name for node in nodes}
        return wait_until(lambda: names <= self._ready(), _READY_S, f"{', '.join(sorted(names))} Ready")

    def wait_lost(self, node: Node) -> float:
        """Wait until a node is not Ready; return the seconds."""
        return wait_until(lambda: node.name not in self._ready(), _READY_S, f"{node.name} NotReady")

    def _node(self, number: int) -> Node:
        return Node(
            number,
            folder=self._folder / addresses.node_name(number),
            programs=self._programs,
            credentials=self._credentials,
            cgroup=self._cgroup,
        )

    def _load(self, nodes: Sequence[Node], archives: Sequence[Path]) -> None:
        with ThreadPoolExecutor(max(1, len(nodes))) as pool:
            loads = [pool.submit(node.load, archive) for archive in archives for node in nodes]
            for load in loads:
                load.result()

    def _ready(self) -> set[str]:
        self._control_plane.check()
        return {node["metadata"]["name"] for node in self.kubectl.list("nodes") if _is_ready(node)}

    def _power_off(self) -> None:
        for node in self.nodes:
            if node.is_on:
                node.power_off()


def _is_ready(node: Any) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in node["status"]["conditions"]
    )
