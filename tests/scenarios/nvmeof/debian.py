"""What the virtual machines are made of, from the machine's own Debian.

Programs, and a kernel that knows NVMe-oF.

Programs are installed, as guests run on the machine's root and use them as well. The kernel is only unpacked,
into a directory that is kept.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.packages import NotHereError, install_programs, run

PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
    "tc": "iproute2",
    "nvme": "nvme-cli",
}
"""By program, the package that brings it."""

KERNELS = ("linux-image-6.12-amd64", "linux-image-amd64")
"""Packages that depend on the newest kernel of a series, the first that there is."""

NEEDED = (
    "NVME_TCP",
    "NVME_RDMA",
    "NVME_HOST_AUTH",
    "NVME_TARGET_TCP",
    "NVME_TARGET_RDMA",
    "NVME_TARGET_AUTH",
)


@dataclass(frozen=True)
class Kernel:
    """A kernel that was unpacked."""

    version: str
    root: Path
    """The directory that has its ``boot`` and ``lib/modules``."""

    @property
    def image(self) -> Path:
        return self.root / "boot" / f"vmlinuz-{self.version}"

    @property
    def modules(self) -> Path:
        return self.root / "lib" / "modules" / self.version


def programs() -> None:
    """Install what is missing. Raises NotHereError."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise NotHereError(f"guests are x86-64, and this is {platform.system()} on {platform.machine()}")
    if os.geteuid() != 0:
        raise NotHereError(
            "guests read the whole of this machine's root, and packages are installed: be root"
        )
    if not shutil.which("apt-get"):
        raise NotHereError("kernel and programs come from Debian's packages, and there is no apt-get")
    install_programs(PROGRAMS)


def kernel(cache: Path) -> Kernel:
    """Return the kernel that lies in the cache, fetched where none does. Raises NotHereError."""
    package = _newest()
    version = package.removeprefix("linux-image-")
    root = cache / version
    made = Kernel(version, root)
    if not (root / "complete").exists():
        print(f"fetching {package}", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        run("apt-get", "download", "-qq", package, folder=root)
        (deb,) = root.glob("*.deb")
        run("dpkg-deb", "-x", str(deb), str(root))
        deb.unlink()
        # Debian 13 has its /lib below /usr.
        if (root / "usr/lib/modules").is_dir() and not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        run("depmod", "-b", str(root), version)
        (root / "complete").touch()
    config = (root / "boot" / f"config-{version}").read_text()
    lacking = [each for each in NEEDED if f"CONFIG_{each}=" not in config]
    if lacking:
        raise NotHereError(f"{package} was built without {', '.join(lacking)}")
    return made


def _newest() -> str:
    for series in KERNELS:
        told = subprocess.run(["apt-cache", "depends", series], capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines():
            word, _, package = line.strip().partition(": ")
            if word == "Depends" and package.startswith("linux-image-"):
                return package
    raise NotHereError(f"Debian's packages have none of {', '.join(KERNELS)}: `apt-get update` first")
