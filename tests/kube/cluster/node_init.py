"""Process 1 of a node: mounts, container runtime, kubelet and kube-proxy.

Run as ``python -m tests.kube.cluster.node_init SETTINGS`` in fresh namespaces. A node has its own /run,
/dev/shm and host name, and a copy-on-write /var; its kubelet, containers and /var/lib/ostraca lie on the
node's disk, a folder of the test.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.kube.cluster import addresses

_SOCKET = Path("/run/containerd/containerd.sock")
_SOCKET_S = 60.0
_RESOLVER = Path("/run/resolv.conf")
_NETWORKS = Path("/run/cni")
_PLUGINS = "/usr/lib/cni"
_SANDBOX_IMAGE = "docker.io/library/ostraca-pause:1"

_DISK = {
    "kubelet": "/var/lib/kubelet",
    "containerd": "/var/lib/containerd",
    "cni": "/var/lib/cni",
    "pods": "/var/log/pods",
    "containers": "/var/log/containers",
    "ostraca": "/var/lib/ostraca",
}
"""Folders of the node's disk and their places."""

_KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Settings of the whole machine that a kubelet changes. The kubelet sees files with its values instead."""


def main() -> None:
    """Bring the node up, and reap processes until the node is switched off."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    # All paths of the test are relative from here: the folder may lie below /var, which changes.
    os.chdir(settings["folder"])
    number, programs = settings["number"], Path(settings["programs"])
    socket.sethostname(addresses.node_name(number))
    _mount()
    _write_networks(number)
    Path("/run/containerd.toml").write_text(_CONTAINERD)
    _start("containerd", "--config", "/run/containerd.toml")
    until_s = time.monotonic() + _SOCKET_S
    while not _SOCKET.exists():
        assert time.monotonic() < until_s, "containerd has not started"
        time.sleep(0.05)
    _start_kubelet(programs, number, settings["cgroup"], settings["kubelet"])
    _start_proxy(programs, number, settings["proxy"])
    Path("ready").touch()
    while True:
        os.wait()


def _mount() -> None:
    _run("mount", "-t", "proc", "proc", "/proc")
    for path in ("var", "var.work", *(f"disk/{name}" for name in _DISK)):
        Path(path).mkdir(exist_ok=True)
    options = f"lowerdir=/var,upperdir={Path('var').absolute()},workdir={Path('var.work').absolute()}"
    _run("mount", "-t", "overlay", "-o", options, "overlay", "/var")
    for name, place in _DISK.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", f"disk/{name}", place)
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm")
    # Volumes of pods propagate between kubelet and runtime, within the node.
    _run("mount", "--make-rshared", "/")
    for name, value in _KERNEL_SETTINGS.items():
        file = Path("/run", name.replace("/", "."))
        file.write_text(f"{value}\n")
        _run("mount", "--bind", str(file), f"/proc/sys/{name}")
    Path("/run/netns").mkdir()


def _write_networks(number: int) -> None:
    _NETWORKS.mkdir()
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            # Not kept over a boot: the pods of before the boot are gone.
            "dataDir": "/run/cni-addresses",
            "ranges": [[{"subnet": addresses.node_pods(number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    networks = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    (_NETWORKS / "10-pods.conflist").write_text(json.dumps(networks))


_CONTAINERD = f"""\
version = 2
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_SANDBOX_IMAGE}"
  # The machine may withhold CAP_SYS_RESOURCE, which a lower score needs.
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{_PLUGINS}"
  conf_dir = "{_NETWORKS}"
"""


def _kubelet_settings(number: int, cgroup: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": addresses.node_address(number),
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        # Without a root of its own, a kubelet kills the pods of the other nodes.
        "cgroupRoot": f"/{cgroup}",
        "failSwapOn": False,
        "clusterDomain": addresses.DOMAIN,
        "clusterDNS": [addresses.CONTROL_PLANE],
        "makeIPTablesUtilChains": False,
        "resolvConf": str(_RESOLVER),
        "maxOpenFiles": 20000,
        "nodeStatusUpdateFrequency": "2s",
        "syncFrequency": "5s",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "serializeImagePulls": False,
    }


def _start_kubelet(programs: Path, number: int, cgroup: str, kubeconfig: str) -> None:
    _RESOLVER.write_text(f"nameserver {addresses.CONTROL_PLANE}\n")
    configuration = Path("/run/kubelet.json")
    configuration.write_text(json.dumps(_kubelet_settings(number, cgroup)))
    # The kubelet looks for credentials of a cloud at addresses that only clouds have, unless told not to.
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    _start(
        *(programs / "kubelet", "--config", configuration, "--kubeconfig", kubeconfig),
        *("--hostname-override", addresses.node_name(number), "--node-ip", addresses.node_address(number)),
        *("--root-dir", "/var/lib/kubelet", "--cert-dir", "/var/lib/kubelet/pki"),
        *("--container-runtime", "remote", "--container-runtime-endpoint", f"unix://{_SOCKET}"),
    )


def _start_proxy(programs: Path, number: int, kubeconfig: str) -> None:
    address = addresses.node_address(number)
    _start(
        *(programs / "kube-proxy", "--kubeconfig", kubeconfig, "--proxy-mode", "iptables"),
        *("--hostname-override", addresses.node_name(number), "--cluster-cidr", addresses.PODS),
        *("--conntrack-max-per-core", "0", "--bind-address", address),
        *("--healthz-bind-address", f"{address}:10256", "--iptables-min-sync-period", "1s"),
    )


def _start(program: str | Path, *words: str | Path) -> None:
    with Path(f"{Path(program).name}.log").open("ab") as log:
        subprocess.Popen([str(program), *map(str, words)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
