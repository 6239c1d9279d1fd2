"""A worker process that gets each chain once, each get in a window of its own.

Usage: ``python -m scripts.structure.get_path.worker FOLDER ADDRESS``

The worker puts all chains and gets some to warm up. No chain is got twice, so no cache of results answers.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.support.pod.work import CHAINS, SMALL, await_puts, empty, hashes, put, volume_of

import ostraca
from scripts.structure.get_path.recording import Recording

DEADLINE_S = 30.0
PAUSE_S = 0.05
"""Time between two gets, so that work after an answer falls into no window."""

WARM_UPS = 8
WINDOWS = range(1, len(CHAINS) - WARM_UPS + 1)


def main() -> None:
    """Put and get; exit with an error if a get misses."""
    recording, address = Recording(Path(sys.argv[1])), sys.argv[2]
    with ostraca.connect(address, settings=replace(SMALL, transports=("nixl",))) as client:
        await_puts(client)
        assert put(client, deadline_s=DEADLINE_S) == list(CHAINS)
        volume, into = volume_of(client), empty()
        chains = [volume.chain(hashes(seed)) for seed in CHAINS]
        for window, chain in enumerate(chains, start=1 - WARM_UPS):
            if window in WINDOWS:
                recording.open_window(window)
            result = volume.get(chain, into=into, deadline_s=DEADLINE_S)
            recording.close_window()
            assert set(result.states) == {ostraca.BlockState.HIT}, result
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
