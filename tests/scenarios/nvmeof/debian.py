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
_APT_S = 900.0


class NotHereError(Exception):
    """This machine can't run it; the message says why."""


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
    missing = sorted({package for program, package in PROGRAMS.items() if not _found(program)})
    if missing:
        print(f"installing {', '.join(missing)}", flush=True)
        _apt("apt-get", "update", "-qq")
        _apt("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


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
        _apt("apt-get", "download", "-qq", package, at=root)
        (deb,) = root.glob("*.deb")
        _apt("dpkg-deb", "-x", str(deb), str(root))
        deb.unlink()
        # Debian 13 has its /lib below /usr.
        if (root / "usr/lib/modules").is_dir() and not (root / "lib").exists():
            (root / "lib").symlink_to("usr/lib")
        _apt("depmod", "-b", str(root), version)
        (root / "complete").touch()
    config = (root / "boot" / f"config-{version}").read_text()
    lacking = [each for each in NEEDED if f"CONFIG_{each}=" not in config]
    if lacking:
        raise NotHereError(f"{package} was built without {', '.join(lacking)}")
    return made


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def _newest() -> str:
    for series in KERNELS:
        told = subprocess.run(["apt-cache", "depends", series], capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines():
            word, _, package = line.strip().partition(": ")
            if word == "Depends" and package.startswith("linux-image-"):
                return package
    raise NotHereError(f"Debian's packages have none of {', '.join(KERNELS)}: `apt-get update` first")


def _apt(*words: str, at: Path | None = None) -> None:
    try:
        done = subprocess.run(
            words,
            cwd=at,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_APT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHereError(f"`{' '.join(words)}`: {error}") from error
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()
        raise NotHereError(f"`{' '.join(words)}` failed: {why[-1] if why else done.returncode}")
