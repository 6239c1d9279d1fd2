"""A directory that behaves as nvmet's configfs does.

What ``mkdir`` brings, what may be written when, what can't go while something holds it. As in Linux's
drivers/nvme/target/configfs.c.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from pathlib import Path

from ostraca_enclosure.adapters.nvmet import Configfs
from ostraca_enclosure.drives import uuid_of

UNSET = "(null)"
"""What a namespace says of a device that was never set."""

ZERO = uuid_of("0" * 32)


class Killed(BaseException):
    """The process ended here."""


class SimulatedNvmet(Configfs):
    """nvmet with nothing in it."""

    def __init__(
        self, root: Path, *, addresses: tuple[str, ...] = ("192.0.2.1",), has_auth: bool = True
    ) -> None:
        super().__init__(root)
        self._addresses = addresses
        self._has_auth = has_auth
        self.has_reservations = False
        """As Linux has from 6.13 on."""

        self.changes = 0
        self.killed_at: int | None = None
        """The process is killed when it is about to make so manieth a change."""
        for each in ("subsystems", "ports", "hosts"):
            (root / each).mkdir(parents=True)

    def mkdir(self, path: str) -> None:
        self._count()
        made = self.root / path
        if made.exists():
            return
        match path.split("/"):
            case ["subsystems", _]:
                made.mkdir()
                self._set(
                    made, attr_allow_any_host="0", attr_serial=uuid.uuid4().hex[:16], attr_version="1.3"
                )
                self._groups(made, "namespaces", "allowed_hosts", "passthru")
            case ["subsystems", _, "namespaces", slot]:
                if not 0 < int(slot) < 0xFFFFFFFF:
                    raise self._refused(errno.EINVAL, path)
                made.mkdir()
                self._set(
                    made, device_path=UNSET, device_nguid=ZERO, device_uuid=str(uuid.uuid4()), enable="0"
                )
                if self.has_reservations:
                    self._set(made, resv_enable="0")
            case ["ports", port]:
                if not 0 <= int(port) <= 65535:
                    raise self._refused(errno.EINVAL, path)
                made.mkdir()
                self._set(made, addr_adrfam="", addr_trtype="", addr_traddr="", addr_trsvcid="")
                self._groups(made, "subsystems", "referrals", "ana_groups")
                (made / "ana_groups" / "1").mkdir()
            case ["hosts", _]:
                made.mkdir()
                if self._has_auth:
                    self._set(made, dhchap_key="", dhchap_ctrl_key="", dhchap_hash="hmac(sha256)")
            case _:
                raise self._refused(errno.EPERM, path)

    def rmdir(self, path: str) -> None:
        self._count()
        gone = self.root / path
        if not gone.exists():
            return
        match path.split("/"):
            case ["subsystems", nqn]:
                if any((port / "subsystems" / nqn).is_symlink() for port in (self.root / "ports").iterdir()):
                    raise self._refused(errno.EBUSY, path)
                self._check_empty(path, "namespaces", "allowed_hosts")
            case ["subsystems", _, "namespaces", _]:
                pass
            case ["ports", _]:
                self._check_empty(path, "subsystems")
            case ["hosts", nqn]:
                if list(self.root.glob(f"subsystems/*/allowed_hosts/{nqn}")):
                    raise self._refused(errno.EBUSY, path)
            case _:
                raise self._refused(errno.EPERM, path)
        shutil.rmtree(gone)

    def write(self, path: str, text: str) -> None:  # noqa: C901 (a case for each attribute)
        self._count()
        file = self.root / path
        if not file.is_file():
            raise self._refused(errno.ENOENT, path)
        folder, name = path.rsplit("/", 1)
        if (name.startswith("device_") or name == "resv_enable") and self.read(f"{folder}/enable") == "1":
            raise self._refused(errno.EBUSY, path)
        if name.startswith("addr_") and self.names(f"{folder}/subsystems"):
            raise self._refused(errno.EACCES, path)
        match name:
            case "enable" if text == "1":
                device = self.read(f"{folder}/device_path")
                if device == UNSET:
                    raise self._refused(errno.EINVAL, path)
                if not Path(device).exists():
                    raise self._refused(errno.ENOENT, path)
            case "attr_allow_any_host" if text == "1" and self.names(f"{folder}/allowed_hosts"):
                raise self._refused(errno.EINVAL, path)
            case "device_nguid" | "device_uuid":
                digits = re.sub("[-:]", "", text)
                if not re.fullmatch("[0-9a-fA-F]{32}", digits):
                    raise self._refused(errno.EINVAL, path)
                text = uuid_of(digits.lower())
            case "dhchap_key" | "dhchap_ctrl_key" if not text.startswith("DHHC-1:"):
                raise self._refused(errno.EINVAL, path)
            case "addr_trtype" if text not in ("tcp", "rdma", "loop", "fc"):
                raise self._refused(errno.EINVAL, path)
        file.write_text(f"{text}\n")

    def link(self, path: str, to: str) -> None:
        self._count()
        if self.has(path):
            return
        if not (self.root / to).is_dir():
            raise self._refused(errno.ENOENT, path)
        match path.split("/"):
            case ["subsystems", nqn, "allowed_hosts", _]:
                if self.read(f"subsystems/{nqn}/attr_allow_any_host") == "1":
                    raise self._refused(errno.EINVAL, path)
            case ["ports", port, "subsystems", _]:
                if not self.names(f"ports/{port}/subsystems"):
                    self._enable(port)
            case _:
                raise self._refused(errno.EPERM, path)
        (self.root / path).symlink_to(self.root / to)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def shown(self) -> list[str]:
        """Return what there is, without attributes: what a test compares."""
        return sorted(
            str(each.relative_to(self.root))
            for each in self.root.rglob("*")
            if (each.is_dir() or each.is_symlink())
            and each.name not in ("namespaces", "allowed_hosts", "passthru", "referrals", "ana_groups")
            and each.parent.name != "ana_groups"
            and len(each.relative_to(self.root).parts) > 1
            and not (each.parent.parent.name == "ports" and each.name == "subsystems")
        )

    def _enable(self, port: str) -> None:
        address = self._address(port)
        if address[0] not in ("tcp", "rdma") or not address[2]:
            raise self._refused(errno.EINVAL, f"ports/{port}")
        if address[1] not in self._addresses:
            raise self._refused(errno.EADDRNOTAVAIL, f"ports/{port}")
        for other in self.names("ports"):
            if other != port and self.names(f"ports/{other}/subsystems") and self._address(other) == address:
                raise self._refused(errno.EADDRINUSE, f"ports/{port}")

    def _address(self, port: str) -> tuple[str, str, str]:
        trtype, traddr, trsvcid = (
            self.read(f"ports/{port}/addr_{name}") for name in ("trtype", "traddr", "trsvcid")
        )
        return trtype, traddr, trsvcid

    def _check_empty(self, path: str, *groups: str) -> None:
        if any(self.names(f"{path}/{group}") for group in groups):
            raise self._refused(errno.ENOTEMPTY, path)

    def _set(self, folder: Path, **attributes: str) -> None:
        for name, value in attributes.items():
            (folder / name).write_text(f"{value}\n")

    def _groups(self, folder: Path, *names: str) -> None:
        for name in names:
            (folder / name).mkdir()

    def _count(self) -> None:
        if self.changes == self.killed_at:
            raise Killed
        self.changes += 1

    def _refused(self, number: int, path: str) -> OSError:
        return OSError(number, os.strerror(number), str(self.root / path))
