"""An enclosure outside of Kubernetes: a daemon of this checkout, with a network address of its own."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from tests.kube.cluster import addresses
from tests.kube.cluster.processes import LoggedProcess, run

_NAMESPACE = "shelf"
_CABLE = "shelf0"
_ADDRESS = "10.77.0.100"
_PORT = 4420
_DRIVES = 2
_DRIVE_SIZE = "512MiB"


class Shelf:
    """Enclosure with drives that are files, exported by NVMe/TCP. Use as a context manager."""

    controller = f"tcp://{_ADDRESS}:{_PORT}"

    def __init__(self, name: str, folder: Path, *, etcd: str, prefix: str) -> None:
        """Name the enclosure and its fabric, by the prefix of the fabric's keys in etcd."""
        self.name = name
        self._folder = folder
        self._drives = folder / "drives"
        self._fabric = ["--etcd", etcd, "--prefix", prefix]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the daemon."""
        self._folder.mkdir()
        self._drives.mkdir()
        self._create_network()
        daemon = [sys.executable, "-m", "ostraca_cli", "serve", "enclosure", "--id", self.name]
        storage = ["--files", str(self._drives), "--drives", str(_DRIVES), "--drive-size", _DRIVE_SIZE]
        state = ["--state-dir", str(self._folder / "state")]
        export = ["--target", "userspace", "--listen", self.controller]
        words = ["ip", "netns", "exec", _NAMESPACE, *daemon, *storage, *state, *export, *self._fabric]
        self._stack.callback(LoggedProcess(self.name, words, self._folder / "daemon.log").end)
        return self

    def __exit__(self, *_: object) -> None:
        """End the daemon and remove its network."""
        self._stack.close()

    def written_bytes(self) -> int:
        """Return the bytes of all drives other than zero: files are allocated whole, and full of zeros."""
        drives = (np.memmap(path, np.uint8, "r") for path in self._drives.glob("*.img"))
        return sum(int(np.count_nonzero(drive)) for drive in drives)

    def _create_network(self) -> None:
        run("ip", "netns", "add", _NAMESPACE)
        self._stack.callback(run, "ip", "netns", "del", _NAMESPACE)
        run("ip", "link", "add", _CABLE, "type", "veth", "peer", "name", "eth0", "netns", _NAMESPACE)
        self._stack.callback(run, "ip", "link", "del", _CABLE)
        run("ip", "link", "set", _CABLE, "master", addresses.BRIDGE, "up")
        run("ip", "-n", _NAMESPACE, "addr", "add", f"{_ADDRESS}/24", "dev", "eth0")
        run("ip", "-n", _NAMESPACE, "link", "set", "eth0", "up")
        run("ip", "-n", _NAMESPACE, "link", "set", "lo", "up")
        for number in range(1, addresses.NODES_MAX + 1):
            route = (addresses.node_pods(number), "via", addresses.node_address(number))
            run("ip", "-n", _NAMESPACE, "route", "add", *route)
