"""The enclosure: drives that QEMU emulates, Linux's own target, and ``ostraca serve enclosure``.

It does what the host's guest asks (``box``).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.scenarios.nvmeof import box, guest
from tests.scenarios.nvmeof.guest import ENCLOSURE, say

NVMET = Path("/sys/kernel/config/nvmet")
_WITHIN_S = 120.0


class Enclosure:
    """One daemon after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hosts = folder / "hosts.toml"
        self._log = folder / "enclosure.log"
        self._daemon: subprocess.Popen[str] | None = None

    def serve(self, name: str, controller: str, drive: str, etcd: list[str], hosts: Mapping[str, str]) -> str:
        """Start a daemon that lets these hosts in, by their secrets; return what it says when it is ready."""
        self._write(hosts)
        with self._log.open("a") as log:
            self._daemon = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ostraca_cli", "serve", "enclosure", "--id", name, *etcd),
                    *("--listen", controller, "--drive", drive, "--force", "--withdraw"),
                    *("--hosts", str(self._hosts), "--state-dir", str(self._folder / name)),
                    *("--set", "etcd.lease_ttl_s=30", "--set", "etcd.request_timeout_s=10"),
                    *("--set", "etcd.operation_timeout_s=30"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._daemon.stdout is not None
        said = self._daemon.stdout.readline()
        assert re.match(r"ready: enclosure .* exports 1 drive as ", said), f"{said!r}: {self.log()}"
        return said

    def let_in(self, hosts: Mapping[str, str]) -> None:
        """Have other hosts, or others' secrets, in the file of hosts, and wait until it counts."""
        self._write(hosts)
        assert self._daemon is not None
        self._daemon.send_signal(signal.SIGHUP)
        until_s = time.monotonic() + _WITHIN_S
        while self._let_in() != hosts:
            assert time.monotonic() < until_s, f"{self._let_in()} are let in: {self.log()}"
            time.sleep(0.2)

    def stop(self) -> list[str]:
        """End the daemon in order; return what nvmet still exports."""
        assert self._daemon is not None
        self._daemon.send_signal(signal.SIGTERM)
        assert (code := self._daemon.wait(_WITHIN_S)) == 0, f"{code}: {self.log()}"
        assert "Traceback" not in self.log(), self.log()
        return [f"{kind}/{each.name}" for kind in ("subsystems", "ports", "hosts") for each in _in(kind)]

    def log(self) -> str:
        """Return what the daemon said last."""
        return self._log.read_text()[-4000:] if self._log.exists() else ""

    def kernel_log(self) -> str:
        """Return what the kernel said last."""
        return guest.kernel_log()[-4000:]

    def cut(self) -> None:
        """Hear nothing of the data network any more."""
        guest.cut(ENCLOSURE)

    def mend(self) -> None:
        """Hear it again."""
        guest.mend(ENCLOSURE)

    def _write(self, hosts: Mapping[str, str]) -> None:
        self._hosts.touch(mode=0o600)
        self._hosts.write_text("".join(f'[hosts."{nqn}"]\nsecret = "{hosts[nqn]}"\n' for nqn in hosts))

    def _let_in(self) -> dict[str, str]:
        return {
            host.name: (host / "dhchap_key").read_text().strip()
            for subsystem in _in("subsystems")
            for host in (subsystem / "allowed_hosts").iterdir()
        }


def _in(kind: str) -> list[Path]:
    return sorted((NVMET / kind).iterdir())


def main() -> None:
    guest.load("nvme", "nvmet", "nvmet-tcp", "nvmet-rdma")
    guest.run("mount", "-t", "configfs", "none", "/sys/kernel/config")
    guest.join_networks(ENCLOSURE)
    folder = Path("/run/enclosure")
    folder.mkdir()
    enclosure = Enclosure(folder)
    say("enclosure: nvmet, and soft RoCE, are there")
    box.serve(
        {
            "serve": enclosure.serve,
            "let in": enclosure.let_in,
            "stop": enclosure.stop,
            "log": enclosure.log,
            "kernel log": enclosure.kernel_log,
            "cut": enclosure.cut,
            "mend": enclosure.mend,
            "end": lambda: None,
        },
        until="end",
    )


if __name__ == "__main__":
    main()
