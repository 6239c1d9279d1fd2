"""What both guests do first: modules, networks, and a word of each step on the console."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

STEP = "STEP "
"""What a line of the console begins with that is told to whoever runs this."""

MODULES = "OSTRACA_GUEST_MODULES"
"""The variable that says where the kernel's modules lie."""

DATA = "192.0.2."
"""The network of NVMe-oF, which is cut."""

MANAGEMENT = "198.51.100."
"""The network of everything else."""

ENCLOSURE, HOST = 1, 2
"""Who is what number on both."""


def mac(network: str, who: int) -> str:
    """Return the address of a guest's card on a network."""
    return f"52:54:00:00:{'0d' if network == DATA else '0a'}:{who:02x}"


def say(words: str) -> None:
    """Tell of a step."""
    print(f"{STEP}[{time.clock_gettime(time.CLOCK_BOOTTIME):.0f} s] {words}", flush=True)


def run(*words: str) -> str:
    """Run a command to its end, and return what it printed."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


def kernel_log() -> str:
    """Return what the kernel said of NVMe, RDMA and of its own trouble."""
    words = ("nvme", "rdma", "rxe", "I/O", "hung", "WARNING", "BUG", "stall")
    return "\n".join(line for line in run("dmesg").splitlines() if any(each in line for each in words))


def load(*modules: str) -> None:
    """Load modules of the kernel."""
    for module in modules:
        run("modprobe", "-d", os.environ[MODULES], module)


def join_networks(who: int) -> None:
    """Take this guest's addresses, and let its card on the data network speak RDMA as well."""
    for network in (DATA, MANAGEMENT):
        card = card_on(network, who)
        run("ip", "address", "add", f"{network}{who}/24", "dev", card)
        run("ip", "link", "set", card, "up")
    # rdma_rxe takes its checksums from the crypto API by name, so no dependency brings this.
    load("crc32_generic", "rdma_rxe")
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", card_on(DATA, who))


def cut(who: int) -> None:
    """Lose silently whatever comes in from the data network.

    Its card stays up: soft RoCE never answers a connection again once it has had no route to send from.
    """
    load("sch_ingress", "cls_matchall", "act_gact")
    card = card_on(DATA, who)
    run("tc", "qdisc", "add", "dev", card, "ingress")
    run("tc", "filter", "add", "dev", card, "ingress", "matchall", "action", "drop")


def mend(who: int) -> None:
    """Lose it no more."""
    run("tc", "qdisc", "del", "dev", card_on(DATA, who), "ingress")


def card_on(network: str, who: int) -> str:
    """Return the name of this guest's card on a network."""
    wanted = mac(network, who)
    (found,) = (
        each.parent.name
        for each in Path("/sys/class/net").glob("*/address")
        if each.read_text().strip() == wanted
    )
    return found
