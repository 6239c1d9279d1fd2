"""What else a process may do that talks to etcd: start others."""

from __future__ import annotations

import subprocess
import sys

from tests.fabric.membership.nodes import Cluster

SCRIPT = """
import asyncio, sys
import uvloop
from ostraca_fabric.membership.etcd import client
import grpc.aio

async def main():
    channel = grpc.aio.insecure_channel(sys.argv[1])
    get = channel.unary_unary("/etcdserverpb.KV/Range")
    for _ in range(3):
        await get(b"\\n\\x01a")
        child = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", "-c", "print('child')")
        assert await child.wait() == 0
    await channel.close()

uvloop.run(main())
"""


def test_what_an_agent_starts_meets_no_handlers_of_grpc_on_its_way(etcd: Cluster) -> None:
    """They tell of themselves where they run: on stderr, and by children that crash now and then."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, etcd.endpoints[0]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "child\n" * 3, "")
