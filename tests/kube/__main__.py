"""``make test-kube``: the Helm chart on a real Kubernetes cluster of several nodes on this machine.

The command obtains programs and images, and runs the scenarios in namespaces of its own: no interface, mount
or process is visible outside, and the end of the command, whatever its cause, ends all of them. A folder
outside of the clone keeps programs and images for the next run.

The exit code is 0 after success, 1 after a failure, and 77, with the reason, on a machine that cannot run
the cluster.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import psutil
from tests.kube.cluster import kubernetes, requirements
from tests.kube.cluster.node import remove_cgroups
from tests.kube.images import provide_images
from tests.kube.scenarios import SCENARIOS
from tests.support.packages import NOT_HERE, NotHereError

CACHE = "OSTRACA_KUBE_CACHE"
_NAMESPACES = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TERMINATED = 143


def main() -> int:
    """Run the command."""
    options = _options()
    signal.signal(signal.SIGTERM, _terminate)
    cache = options.cache
    cache.mkdir(parents=True, exist_ok=True)
    try:
        requirements.check(cache)
        with _alone(cache):
            requirements.install()
            programs = kubernetes.provide(cache)
            images = provide_images(cache)
    except NotHereError as error:
        print(f"skipped: {error}")
        return NOT_HERE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    cgroup = f"ostraca-kube-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache))
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "programs": str(programs),
                "images": asdict(images),
                "folder": str(folder),
                "cgroup": cgroup,
                "scenarios": options.scenario or list(SCENARIOS),
                "is_held": options.hold,
            },
            default=str,
        )
    )
    try:
        return _run(settings, None if options.hold else options.limit)
    finally:
        remove_cgroups(cgroup)
        shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="test-kube", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="run only this scenario")
    parser.add_argument("--hold", action="store_true", help="keep the cluster at the end, until Ctrl-C")
    parser.add_argument(
        "--limit",
        type=float,
        default=1200.0,
        metavar="SECONDS",
        help="of the scenarios (default: %(default)s)",
    )
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostraca-kube"
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get(CACHE) or default),
        help=f"folder of programs and images (environment: {CACHE}; default: %(default)s)",
    )
    return parser.parse_args()


def _run(settings: Path, limit_s: float | None) -> int:
    """Run the scenarios in fresh namespaces; return the exit code."""
    began_s = time.monotonic()
    # A session of its own: Ctrl-C reaches this process alone, which then ends the namespaces as a whole.
    process = subprocess.Popen(
        ["unshare", *_NAMESPACES, sys.executable, "-m", "tests.kube.inside", str(settings)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if limit_s is None:
            _print_entrance(process.pid)
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"not within {limit_s:.0f} s")
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
    print(f"{'failed' if code else 'passed'} after {time.monotonic() - began_s:.0f} s", flush=True)
    return code


def _print_entrance(pid: int) -> None:
    """Print the command that enters the namespaces of a run."""
    while not (children := psutil.Process(pid).children()):
        time.sleep(0.05)
    print(f"enter the cluster by: nsenter --target {children[0].pid} --mount --net --pid", flush=True)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Exclude other runs from the folder of programs and images."""
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _terminate(_number: int, _frame: FrameType | None) -> None:
    sys.exit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
