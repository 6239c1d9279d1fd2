"""A machine's NVMe drives as sysfs and procfs show them, and an ``nvme`` that says what it is told to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostraca_enclosure.adapters.nvme_drives import NvmeDrives, Roots
from ostraca_enclosure.ports import InventoryError

SMART: dict[str, Any] = {
    "critical_warning": 0,
    "temperature": 308,
    "avail_spare": 100,
    "spare_thresh": 10,
    "percent_used": 3,
    "data_units_read": 1_000_000,
    "data_units_written": 900_000_000,
    "power_on_hours": 8760,
    "media_errors": 0,
}
CONTROLLER: dict[str, Any] = {"ver": 0x10400, "vwc": 0, "hmpre": 0, "oncs": 95}
NAMESPACE: dict[str, Any] = {
    "flbas": 0,
    "lbafs": [{"ms": 0, "ds": 12, "rp": 0}, {"ms": 8, "ds": 12, "rp": 0}, {"ms": 0, "ds": 9, "rp": 2}],
}
SIZE_BYTES = 3_840_755_982_336


@dataclass
class Machine:
    """A tree of files in *root*, and how its ``nvme`` answers."""

    root: Path
    smart: dict[str, Any] = field(default_factory=lambda: dict(SMART))
    controller: dict[str, Any] = field(default_factory=lambda: dict(CONTROLLER))
    namespace: dict[str, Any] = field(default_factory=lambda: dict(NAMESPACE))
    trouble: str = ""
    asked: list[list[str]] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.roots = Roots(self.root / "sys", self.root / "proc", self.root / "dev")
        (self.roots.sys / "block").mkdir(parents=True)
        self.roots.dev.mkdir()
        self.put("proc/self/mountinfo", "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")
        self.put("proc/swaps", "Filename\t\tType\t\tSize\tUsed\tPriority\n")
        self.drives = NvmeDrives(lambda: self.now_s, roots=self.roots, run=self.run)

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def drive(self, name: str = "nvme0n1", *, transport: str = "pcie", **attributes: str) -> None:
        """Add a drive whose attributes in sysfs are these."""
        number = name.removeprefix("nvme").partition("n")[0]
        controller = f"sys/devices/pci0000:00/nvme/nvme{number}"
        for file, text in (
            ("model", "ACME 4T"),
            ("serial", f"SN{number}"),
            ("firmware_rev", "1.0"),
            ("transport", transport),
        ):
            self.put(f"{controller}/{file}", f"{text}\n")
        self.place(name, controller, number, **attributes)

    def place(self, name: str, parent: str, number: str, **attributes: str) -> None:
        block = f"{parent}/{name}"
        given = {
            "size": str(SIZE_BYTES // 512),
            "ro": "0",
            "dev": f"259:{number}",
            "nsid": "1",
            "queue/logical_block_size": "4096",
            "queue/zoned": "none",
            "nguid": f"36344630-5280-0105-0025-38410000000{number}",
        } | {key.replace("__", "/"): value for key, value in attributes.items()}
        for file, text in given.items():
            if text:
                self.put(f"{block}/{file}", f"{text}\n")
        (self.root / block / "device").symlink_to(self.root / parent)
        (self.root / block / "holders").mkdir()
        (self.roots.sys / "block" / name).symlink_to(self.root / block)
        (self.roots.dev / name).write_bytes(b"")

    def run(self, words: Sequence[str]) -> str:
        self.asked.append(list(words))
        if self.trouble:
            raise InventoryError(self.trouble)
        said = {"smart-log": self.smart, "id-ctrl": self.controller, "id-ns": self.namespace}[words[1]]
        return json.dumps(said)
