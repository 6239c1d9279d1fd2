"""How long a get of blocks on two drives takes while one of them hangs.

`python -m tests.support.fabric.drive_times`.

What docs/adr/0016 quotes. Prints the milliseconds of gets in a row: on good drives, from when one hangs, and
from when it does well again; and what became of the blocks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.fabric.fabric_host import LAYOUT, SMALL, FabricThread, content, empty, hashes
from tests.support.fabric.faulty_drive import BLOCK_BYTES, Fault, FaultyDrive

from ostraca import Ack
from ostraca_cli.testing import small_plan
from ostraca_fabric.ports.drive import Drive

BLOCKS = 64
GETS = 6


def main() -> None:
    drives: list[FaultyDrive] = []

    def faulty(drive: Drive) -> FaultyDrive:
        drives.append(FaultyDrive(drive))
        return drives[-1]

    with (
        tempfile.TemporaryDirectory() as directory,
        FabricThread(small_plan(Path(directory)), wrap_drive=faulty) as fabric,
        fabric.connect(SMALL) as client,
    ):
        volume = client.volume("v", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain = volume.chain(hashes(BLOCKS, 1), is_chained=False)
        volume.put(chain, source=content(BLOCKS, 1, BLOCK_BYTES), deadline_s=20, ack=Ack.COMMITTED)
        into = empty(BLOCKS, BLOCK_BYTES)

        def gets(what: str) -> None:
            for _ in range(GETS):
                begun_s = time.perf_counter()
                got = volume.get(chain, into=into, deadline_s=3.0)
                took_ms = 1000 * (time.perf_counter() - begun_s)
                became = Counter(
                    f"{state.name} {reason.name}"
                    for state, reason in zip(got.states, got.reasons, strict=True)
                )
                sys.stdout.write(f"{what:8} {took_ms:8.1f} ms  {dict(became)}\n")

        gets("good")
        fabric.call_soon(lambda: setattr(drives[0], "fault", Fault.READ_HANGS))
        gets("hangs")
        fabric.call_soon(drives[0].mend)
        gets("mended")


if __name__ == "__main__":
    main()
