"""The decoders under libFuzzer, which keeps the inputs that took a way through the code not taken before.

``python -m tests.scenarios.fuzz.guided DIRECTORY SECONDS SEED``; it needs atheris. An input is a stream of
frames, read
as one piece; the samples of every message are where it begins.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["ostraca_fabric.wire", "ostraca_fabric.model.chain", "ostraca_fabric.model.volume"]
):
    from tests.fabric.wire.samples import SAMPLES
    from tests.scenarios.fuzz.decoding import decode

from ostraca_fabric.wire.frames import encode

INPUT_BYTES_MAX = 4096


def _one(data: bytes) -> None:
    decode(data, [])


def main() -> None:
    """Fuzz until the time is over, or something was found."""
    directory, seconds, seed = Path(sys.argv[1]) / "guided", int(sys.argv[2]), int(sys.argv[3])
    directory.mkdir()
    for number, sample in enumerate(SAMPLES):
        (directory / str(number)).write_bytes(encode(sample))
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed or 1}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={directory}/",
        "-print_final_stats=1",
        "-rss_limit_mb=1024",
        "-timeout=5",
    ]
    atheris.Setup([sys.argv[0], *options, str(directory)], _one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
