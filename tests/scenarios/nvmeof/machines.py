"""Virtual machines: QEMU without hardware's help, since a kernel of its own is all that is asked of them.

A guest has no disk of its own. It runs on this machine's root, which it sees read-only, with what it writes
kept in its memory; so this checkout and its Python are there as they are here. Two networks lead from guest
to guest, and to nowhere else: each is a unix socket.
"""

from __future__ import annotations

import lzma
import os
import queue
import shlex
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.scenarios.nvmeof.debian import Kernel

KERNEL_OPTIONS = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off no_timer_check"
"""On a busy machine an emulated timer is late, and the kernel's look at boot would take it for broken."""

PANIC = "Kernel panic"
"""What a console says of a guest that goes on no more, and may not end either."""

_BOOT_MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay")
_INIT = Path(__file__).with_name("init.sh")
_END_S = 10.0


@dataclass(frozen=True)
class Disk:
    """An NVMe drive of a guest."""

    image: Path
    serial: str
    uuid: str


@dataclass(frozen=True)
class Wire:
    """A network between two guests."""

    socket: Path
    mac: str
    is_first: bool
    """Whether this end is there before the other."""


class Machine:
    """One guest, from its boot to its end. Close it."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        initrd: Path,
        *,
        memory_mib: int,
        processors: int,
        disks: Iterable[Disk] = (),
        wires: Iterable[Wire] = (),
    ) -> None:
        """Boot it, of lower priority than what else runs here."""
        self.name = name
        command = [
            *("nice", "-n", "5", "qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512"),
            *("-cpu", "max", "-m", str(memory_mib), "-smp", str(processors)),
            *("-display", "none", "-monitor", "none", "-serial", "stdio", "-no-reboot", "-nic", "none"),
            *("-kernel", str(kernel.image), "-initrd", str(initrd)),
            *("-append", KERNEL_OPTIONS),
            *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=hostroot", "-device", "virtio-rng-pci"),
        ]
        for number, disk in enumerate(disks):
            command += [
                *("-drive", f"file={disk.image},if=none,id=drive{number},format=raw,cache=unsafe"),
                *("-device", f"nvme,id=nvme{number},serial={disk.serial}"),
                *("-device", f"nvme-ns,bus=nvme{number},drive=drive{number},nsid=1,uuid={disk.uuid}"),
            ]
        for number, wire in enumerate(wires):
            server = "on" if wire.is_first else "off"
            command += [
                *("-netdev", f"stream,id=net{number},server={server},addr.type=unix,addr.path={wire.socket}"),
                *("-device", f"virtio-net-pci,netdev=net{number},mac={wire.mac},romfile="),
            ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def follow(self, log: Path, lines: queue.SimpleQueue[tuple[str, str | None]]) -> threading.Thread:
        """Begin to write down what its console says; put each line into the queue, and None at its end."""

        def read() -> None:
            assert self._process.stdout is not None
            with log.open("w") as kept:
                for raw in self._process.stdout:
                    line = raw.decode(errors="replace").rstrip()
                    print(line, file=kept, flush=True)
                    lines.put((self.name, line))
            lines.put((self.name, None))

        reading = threading.Thread(target=read, name=f"console-{self.name}", daemon=True)
        reading.start()
        return reading

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(_END_S)


def make_initrd(
    at: Path, kernel: Kernel, module: str, arguments: Mapping[str, str], python: list[str]
) -> None:
    """Write what a guest begins with.

    Modules that lead to its root, and *module* to run there by *python*, with *arguments* in its
    environment.
    """
    folders = ("bin", "proc", "sys", "dev", "lower", "rw", "host", "modules")
    files: dict[str, tuple[int, bytes]] = dict.fromkeys(folders, (stat.S_IFDIR | 0o755, b""))
    busybox = shutil.which("busybox")
    assert busybox is not None
    files["bin/busybox"] = (stat.S_IFREG | 0o755, Path(busybox).read_bytes())
    files["init"] = (stat.S_IFREG | 0o755, _INIT.read_bytes())
    words = ["env", "-i", *(f"{name}={value}" for name, value in arguments.items()), *python, "-m", module]
    files["guest"] = (stat.S_IFREG | 0o644, (shlex.join(words) + "\n").encode())
    order = []
    for path in _in_order(kernel, _BOOT_MODULES):
        held = (kernel.modules / path).read_bytes()
        name = Path(path).name.removesuffix(".xz")
        files[f"modules/{name}"] = (
            stat.S_IFREG | 0o644,
            lzma.decompress(held) if path.endswith(".xz") else held,
        )
        order.append(name)
    files["modules/order"] = (stat.S_IFREG | 0o644, ("\n".join(order) + "\n").encode())
    at.write_bytes(_cpio(files))


def _in_order(kernel: Kernel, wanted: Iterable[str]) -> list[str]:
    """Return modules' files, each behind those that it needs."""
    needs, named = {}, {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
        named[Path(path).name.partition(".")[0].replace("-", "_")] = path
    found: dict[str, None] = {}
    for each in wanted:
        if each in named:  # else it is built in
            path = named[each]
            found |= dict.fromkeys([*reversed(needs[path]), path])
    return list(found)


def _cpio(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return an archive in the format "newc": Linux, Documentation/driver-api/early-userspace."""
    packed = bytearray()
    for number, (name, (mode, data)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        encoded = os.fsencode(name) + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        packed += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        packed += b"\0" * (-len(packed) % 4) + data
        packed += b"\0" * (-len(packed) % 4)
    return bytes(packed)
