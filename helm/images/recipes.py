"""Recipes of the images: Debian packages, Python packages, entry point."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = "ostraca"
USER: Final = 10001
"""Number of the user and of the group that own an image's process; Kubernetes compares numbers only."""

OWNED_FOLDERS: Final = ("etc/ostraca", "run/ostraca", "var/lib/ostraca")
"""Folders of that user; a read-only root file system needs a volume in place of the last two."""

ENVIRONMENT: Final = {
    "HOME": "/var/lib/ostraca",  # NIXL looks there for its settings, under any user
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",  # the root file system is read-only
}

# A shell and its tools remain for `kubectl exec`, and for preStop hooks.
SYSTEM: Final = ("base-files", "netbase", "ca-certificates", "dash", "coreutils")
PYTHON: Final = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
RDMA: Final = ("libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1")
NVME: Final = ("nvme-cli", "kmod")
ETCD: Final = ("etcd-server", "etcd-client")


@dataclass(frozen=True)
class Recipe:
    """Content and configuration of one image."""

    role: str
    summary: str
    packages: tuple[tuple[str, ...], ...]
    """Debian packages, a group per layer. Images with the same first groups share these layers."""

    lock: str
    """Name of a lock file of Python packages; empty: no Python in the image."""

    entrypoint: tuple[str, ...]
    command: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The image's name without a tag."""
        return f"{REPOSITORY}-{self.role}"


RECIPES: Final = (
    Recipe("agent", "agent of a fabric", (SYSTEM, PYTHON, RDMA), "agent", ("ostraca", "serve", "agent")),
    Recipe(
        "enclosure",
        "daemon of an enclosure",
        (SYSTEM, PYTHON, NVME),
        "enclosure",
        ("ostraca", "serve", "enclosure"),
    ),
    Recipe(
        "admin",
        "admin service, and commands of operators",
        (SYSTEM, PYTHON),
        "admin",
        ("ostraca", "serve", "admin"),
    ),
    # The same content as the agent: a node with both images stores the layers once.
    Recipe("worker", "SDK with NIXL, and tools", (SYSTEM, PYTHON, RDMA), "agent", ("ostraca",), ("--help",)),
    Recipe("etcd", "etcd of Debian, for trials", (SYSTEM, ETCD), "", ("/usr/bin/etcd",)),
)


def project_version(source: Path) -> str:
    """Return the version in a checkout of the project."""
    text = (source / "fabric/ostraca_fabric/runtime/version.py").read_text("utf-8")
    match = re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE)
    assert match, "the module holds the version"
    return match[1]
