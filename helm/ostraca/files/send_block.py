"""Send a block through the fabric, get the block back, and compare: the test of `helm test`.

The block is random and new, so that no earlier run can answer for the fabric. Until the first enclosure is
onboarded, agents decline puts; the test repeats the put for two minutes.
"""

import hashlib
import os
import sys
import time

import numpy as np

import ostraca

BLOCK_BYTES = 1 << 16
WITHIN_S = 120.0
PAUSE_S = 1.0


def main() -> int:
    """Return 0 if the block came back unchanged."""
    block = np.frombuffer(os.urandom(BLOCK_BYTES), np.uint8).reshape(1, BLOCK_BYTES)
    names = [hashlib.sha256(block.tobytes()).digest()]
    layout = ostraca.Layout(model="helm-test@1", dtype="bf16", page_tokens=16)
    until_s = time.monotonic() + WITHIN_S
    while True:
        try:
            reason = _put(layout, names, block)
        except ostraca.AuthenticationError as error:
            print(f"the worker's token is refused: {error}")
            return 1
        if not reason:
            break
        if time.monotonic() > until_s:
            print(f"the block was not stored within {WITHIN_S:.0f} s: {reason}")
            return 1
        time.sleep(PAUSE_S)
    with _connected() as client:
        volume = client.volume("helm-test", layout, block_bytes=BLOCK_BYTES, create=True)
        into = np.zeros_like(block)
        result = volume.get(volume.chain(names), into=into, deadline_s=10.0)
    if result.hits != 1 or not np.array_equal(into, block):
        print(f"the stored block did not come back: {result}")
        return 1
    print(f"a block of {BLOCK_BYTES} bytes was stored on flash, and came back unchanged")
    return 0


def _connected() -> ostraca.Client:
    return ostraca.connect(tenant=os.environ["OSTRACA_TENANT"])


def _put(layout: ostraca.Layout, names: list[bytes], block: np.ndarray) -> str:
    """Return the reason of a failure; empty if the block is on flash.

    Raises AuthenticationError for a refused token.
    """
    try:
        with _connected() as client:
            volume = client.volume("helm-test", layout, block_bytes=BLOCK_BYTES, create=True)
            chain = volume.chain(names)
            result = volume.put(chain, source=block, deadline_s=10.0, ack=ostraca.Ack.COMMITTED)
    except ostraca.AuthenticationError:
        raise
    except ostraca.OstracaError as error:
        return str(error)
    return "" if result.accepted == 1 else str(result)


if __name__ == "__main__":
    sys.exit(main())
