"""LMCache's ``lmcache bench l2``: stores, look-ups and loads of objects through L2 adapters.

``.venv-lmcache/bin/python -m benchmarks.third_party.lmcache_l2`` runs the benchmark with LMCache's two file
adapters and with Ostraca's plug-in, several times in turns; ``scripts/setup-lmcache`` makes the environment.
Files are written and read around the page cache, unless ``--buffered`` is given.

The judge compares the bytes of its last round, so each run has a single measured round. A lost or wrong
object, or a round that timed out, ends the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.third_party import comparison
from ostraca_cli.tools.bench.fabric import running_fabric

_HIT_RATE = 0.5
_QUIET = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class ObjectRates:
    """Result of one run."""

    store_mb_s: float
    load_mb_s: float
    lookup_ms: float
    """Time of a round of look-ups, half of them hits."""

    @classmethod
    def of(cls, metrics: dict[str, Any]) -> ObjectRates:
        """Read the judge's report. Raises AssertionError for a lost object and for a timeout."""
        found = {each["operation"]: each for name, each in metrics.items() if name != "config"}
        for name, each in found.items():
            expected = each["total_keys"] * (_HIT_RATE if name == "Lookup" else 1)
            assert not each["rounds_timed_out"], f"a round timed out: {each}"
            assert each["total_success"] == expected, f"{expected:.0f} objects should succeed: {each}"
        return cls(
            found["Store"]["throughput_avg_mbps"],
            found["Load"]["throughput_avg_mbps"],
            found["Lookup"]["duration_avg_ms"],
        )


def bench(adapter: dict[str, Any], options: argparse.Namespace, folder: Path) -> ObjectRates:
    """Run the judge once. Raises AssertionError if the judge fails, as after wrong bytes."""
    report = folder / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "bench", "l2"),
            *("--l2-adapter", json.dumps(adapter)),
            *("--num-keys", str(options.keys), "--in-flight", str(options.in_flight)),
            *("--data-size-kb", str(options.object_kib), "--l1-align-bytes", "4096"),
            *("--rounds", "1", "--warmup-rounds", "1", "--lookup-max-hit-rate", str(_HIT_RATE)),
            *("--no-skip-verify", "--format", "json", "--output", str(report), "--quiet"),
        ],
        env=os.environ | _QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, f"LMCache has failed:\n{done.stdout}{done.stderr}"
    return ObjectRates.of(json.loads(report.read_text())["metrics"])


def compare(options: argparse.Namespace) -> dict[str, list[ObjectRates]]:
    """Run the judge with all adapters in turns, each time with an empty store."""

    def with_files(adapter: str, folder: Path, _: int) -> ObjectRates:
        entries = folder / "objects"
        entries.mkdir()
        written = {"type": adapter, "base_path": str(entries), "use_odirect": not options.buffered}
        return bench(written, options, folder)

    def with_fabric(folder: Path, _: int) -> ObjectRates:
        with running_fabric(folder, "--capacity", options.capacity, "--dram", options.dram) as fabric:
            written = {
                "type": "plugin",
                "module_path": "ostraca.connectors.lmcache",
                "class_name": "OstracaL2Adapter",
                "shared": True,
                "adapter_params": {"agents": fabric.address, "start_wait_s": 20},
            }
            return bench(written, options, folder)

    stores = {adapter: partial(with_files, adapter) for adapter in ("fs", "fs_native")}
    return comparison.compare({**stores, "fabric": with_fabric}, options)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="lmcache_l2", description=__doc__)
    parser.add_argument("--keys", type=int, default=16, help="in one submission (default: %(default)s)")
    parser.add_argument("--in-flight", type=int, default=4, help="submissions at once (default: %(default)s)")
    parser.add_argument("--object-kib", type=int, default=4096, help="size (default: %(default)s)")
    parser.add_argument("--buffered", action="store_true", help="let files use the page cache")
    comparison.add_options(parser, runs=5, capacity="4GiB")
    options = parser.parse_args()
    if importlib.util.find_spec("lmcache") is None:
        parser.error(
            "LMCache is not installed here: run scripts/setup-lmcache, and use .venv-lmcache/bin/python"
        )
    comparison.report(compare(options), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
