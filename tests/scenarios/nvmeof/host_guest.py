"""The host: etcd, an agent, the admin service and a worker.

It leads; the enclosure's guest does what it asks.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from tests.fabric.membership.nodes import Cluster, Place
from tests.scenarios.nvmeof import box, guest
from tests.scenarios.nvmeof.guest import HOST, MANAGEMENT, say
from tests.scenarios.nvmeof.life import SETTINGS, Life
from tests.support.pod.admin import Admin
from tests.support.pod.processes import Pod

PASSED = "RESULT passed"
TRANSPORTS = "OSTRACA_GUEST_TRANSPORTS"
SLOW = ("etcd.lease_ttl_s=30", "etcd.request_timeout_s=10", "etcd.operation_timeout_s=30")
_TAIL = 5000


def main() -> int:
    # A refused secret may take as long as this to be told, and over RDMA six times as long: 60 s unless it is
    # set.
    guest.run("modprobe", "-d", os.environ[guest.MODULES], "nvme_core", "admin_timeout=15")
    guest.load("nvme-tcp", "nvme-rdma")
    guest.join_networks(HOST)
    say(f"host: Linux {os.uname().release}, soft RoCE is there")
    folder = Path("/run/host")
    folder.mkdir()
    secrets = folder / "secrets"
    secrets.mkdir(mode=0o700)
    cluster = Cluster(folder, places=[Place(f"{MANAGEMENT}{HOST}")])
    say("host: etcd is up")
    try:
        with Pod(folder, cluster, settings=SETTINGS) as pod:
            pod.create(enclosures=0)
            say("host: the fabric is begun")
            agent = pod.agent("agent-0", "--set", f"nvme.secrets_dir={secrets}")
            agent.launch()
            slow = [word for each in SLOW for word in ("--set", each)]
            with Admin(pod, "admin-0", *slow) as admin:
                agent.await_ready()
                say("host: agent and admin service are up")
                try:
                    for number, transport in enumerate(os.environ[TRANSPORTS].split(",")):
                        Life(transport, f"nvme{number}n1", pod, agent, admin, secrets).run()
                    agent.stop()
                    pod.check_logs()
                    admin.check_log()
                except BaseException:
                    tell(agent.log, admin.log)
                    raise
    except BaseException:  # noqa: BLE001 (told, and the exit code says it)
        traceback.print_exc()
        return 1
    finally:
        cluster.close()
        box.ask("end")
    print(PASSED, flush=True)
    return 0


def tell(*logs: Path) -> None:
    """Print what everybody said last: nothing that a guest wrote outlives it."""
    for log in logs:
        print(f"--- {log.name}\n{log.read_text()[-_TAIL:]}", flush=True)
    print(f"--- the kernel\n{guest.kernel_log()[-_TAIL:]}", flush=True)
    print(f"--- the enclosure\n{box.ask('log')}\n--- its kernel\n{box.ask('kernel log')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
