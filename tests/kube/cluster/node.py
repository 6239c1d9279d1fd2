"""A node: mount, network, process, host name and IPC namespaces with a container runtime and a kubelet.

A node has a power switch and a network cable. Power-off kills all of its processes at once and removes its
network, so that peers get no answer at all; its disk stays. An unplugged node goes on by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import psutil
from tests.kube.cluster import addresses
from tests.kube.cluster.credentials import Credentials
from tests.kube.cluster.processes import ClusterError, LoggedProcess, run, wait_until

_BOOT_S = 90.0
_CGROUPS = Path("/sys/fs/cgroup")


class Node:
    """A node of the cluster, off at first."""

    def __init__(
        self, number: int, *, folder: Path, programs: Path, credentials: Credentials, cgroup: str
    ) -> None:
        self.number = number
        self.name = addresses.node_name(number)
        self.address = addresses.node_address(number)
        self._folder = folder
        self._cable = f"cable{number}"
        self._cgroup = f"{cgroup}/{self.name}"
        self._process: LoggedProcess | None = None
        self._disk = folder / "disk"
        self._disk.mkdir(parents=True)
        self._settings = folder / "settings.json"
        self._settings.write_text(
            json.dumps(
                {
                    "number": number,
                    "folder": str(folder),
                    "programs": str(programs),
                    "cgroup": self._cgroup,
                    "kubelet": str(credentials.kubeconfig(self.name)),
                    "proxy": str(credentials.kubeconfig("proxy")),
                }
            )
        )

    @property
    def is_on(self) -> bool:
        return self._process is not None

    def boot(self) -> None:
        """Switch the node on; return when the container runtime answers."""
        assert self._process is None, f"{self.name} is on"
        self._create_network()
        for controller in controllers():
            (controller / self._cgroup).mkdir(parents=True, exist_ok=True)
        namespaces = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
        # `ip netns exec` would mount another /sys, without the control groups.
        words = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", *namespaces]
        module = "tests.kube.cluster.node_init"
        self._process = LoggedProcess(
            self.name,
            [*words, sys.executable, "-m", module, str(self._settings)],
            self._folder / "init.log",
        )
        wait_until(self._has_runtime, _BOOT_S, f"container runtime of {self.name}")

    def power_off(self) -> None:
        """Pull the power cord: no process of the node does anything from now on."""
        assert self._process is not None, f"{self.name} is off"
        run("ip", "link", "del", self._cable)
        self._process.kill()
        self._process = None
        run("ip", "netns", "del", self.name)

    def unplug(self) -> None:
        """Pull the network cable."""
        run("ip", "link", "set", self._cable, "down")

    def plug(self) -> None:
        """Put the network cable back."""
        run("ip", "link", "set", self._cable, "up")

    def load(self, image: Path) -> None:
        """Import an archive of images into the node's container runtime."""
        self.run("ctr", "--namespace", "k8s.io", "images", "import", str(image))

    def run(self, *words: str) -> str:
        """Run a command within the node's namespaces. Raises ClusterError."""
        return run(
            "nsenter", "--target", str(self._init_pid()), *("-m", "-n", "-p", "-u", "-i"), "--", *words
        )

    def remove(self, name: str) -> None:
        """Remove what lies at a path below the node's /var/lib/ostraca."""
        shutil.rmtree(self._disk / "ostraca" / name, ignore_errors=True)

    def _init_pid(self) -> int:
        if self._process is None:
            raise ClusterError(f"{self.name} is off")
        children = psutil.Process(self._process.pid).children()
        if not children:
            raise ClusterError(f"{self.name} has ended: see {self._process.log}")
        return int(children[0].pid)

    def _has_runtime(self) -> bool:
        assert self._process is not None
        if not self._process.is_running:
            raise ClusterError(f"{self.name} has ended: see {self._process.log}")
        return (self._folder / "ready").exists()

    def _create_network(self) -> None:
        (self._folder / "ready").unlink(missing_ok=True)
        name, cable = self.name, self._cable
        run("ip", "netns", "add", name)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", cable, "master", addresses.BRIDGE, "up")
        run("ip", "-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "route", "add", addresses.SERVICES, "via", addresses.CONTROL_PLANE)
        for other in range(1, addresses.NODES_MAX + 1):
            if other != self.number:
                subnet, gateway = addresses.node_pods(other), addresses.node_address(other)
                run("ip", "-n", name, "route", "add", subnet, "via", gateway)
        run("ip", "route", "replace", addresses.node_pods(self.number), "via", self.address)
        run(
            *("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1"),
            *("net.ipv4.conf.all.route_localnet=1", "net.bridge.bridge-nf-call-iptables=1"),
        )


def controllers() -> list[Path]:
    """Return the hierarchies of control groups, version 1."""
    return [path for path in _CGROUPS.iterdir() if path.is_dir() and path.name != "unified"]


def remove_cgroups(name: str, within_s: float = 10.0) -> None:
    """Remove all control groups of a run, whose processes have been killed."""
    until_s = time.monotonic() + within_s
    for controller in controllers():
        for path, _, _ in os.walk(controller / name, topdown=False):
            while True:
                try:
                    Path(path).rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # the kernel has not yet removed a killed process
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(0.05)
