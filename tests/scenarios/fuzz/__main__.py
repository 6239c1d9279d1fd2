"""``make fuzz``: a million frames, most of them wrong, for the decoders, for an agent, and for the SDK.

Ends with 0 when nothing was found, with 1 and the way to see it again when something was.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.scenarios.fuzz.targets import SHARES, TARGETS, Finding, run_case, run_target

HANG_S = 60.0
GUIDED_S = 30


def _say(text: str) -> None:
    print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many, all targets together")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most that each target takes")
    parser.add_argument("--seed", type=int, default=None, help="of all chance (default: a new one, printed)")
    parser.add_argument("--target", choices=(*TARGETS, "guided"), help="only this one")
    parser.add_argument("--case", type=int, default=None, help="only this case of --target and --seed")
    parser.add_argument(
        "--guided-seconds",
        type=int,
        default=GUIDED_S,
        help="how long the decoders are fuzzed by coverage, where atheris is installed",
    )
    return parser.parse_args()


def _guided(seconds: int, seed: int, directory: Path) -> None:
    """Let libFuzzer look for ways through the decoders that no case has gone."""
    if importlib.util.find_spec("atheris") is None:
        _say("guided: left out, atheris is not installed (it has wheels for x86-64 only)")
        return
    command = [sys.executable, "-m", "tests.scenarios.fuzz.guided", str(directory), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Finding("guided", seed, 0, (done.stdout + done.stderr)[-8000:])
    runs = [line for line in done.stderr.splitlines() if line.startswith(("Done", "stat::"))]
    _say(f"guided: {' '.join(runs) or 'done'}")


def main() -> int:
    """Run what was asked for."""
    chosen = _arguments()
    seed = secrets.randbelow(1 << 32) if chosen.seed is None else chosen.seed
    began_s, taken = time.monotonic(), 0
    _say(f"seed {seed}")
    try:
        with tempfile.TemporaryDirectory(prefix="ostraca-fuzz-") as folder:
            directory = Path(folder)
            if chosen.case is not None and chosen.target in TARGETS:
                with TARGETS[chosen.target](directory / "case", _say) as running:
                    run_case(chosen.target, running, seed=seed, case=chosen.case)
                _say("nothing found")
                return 0
            for name, share in SHARES.items():
                if chosen.target in (None, name):
                    frames = chosen.frames if chosen.target else int(chosen.frames * share)
                    faulthandler.dump_traceback_later(chosen.seconds + HANG_S, exit=True)
                    taken += run_target(
                        name, directory, seed=seed, frames=frames, seconds=chosen.seconds, say=_say
                    )
                    faulthandler.cancel_dump_traceback_later()
            if chosen.target in (None, "guided"):
                _guided(chosen.guided_seconds, seed, directory)
    except (Finding, AssertionError) as finding:
        _say(f"FOUND, seed {seed}:\n{finding}")
        return 1
    took_s = time.monotonic() - began_s
    _say(f"{taken} frames in {took_s:.0f} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
