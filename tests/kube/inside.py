"""Run scenarios on a cluster, as process 1 of the namespaces that the command creates.

Run as ``python -m tests.kube.inside SETTINGS``; the settings are a file that the command writes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.kube.cluster.cluster import Cluster
from tests.kube.cluster.processes import run
from tests.kube.diagnosis import describe
from tests.kube.images import ClusterImages, ImageSet
from tests.kube.scenarios import SCENARIOS
from tests.kube.stage import Stage


def main() -> int:
    """Run the scenarios; return the exit code."""
    began_s = time.monotonic()
    settings = json.loads(Path(sys.argv[1]).read_text())
    run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
    Path("/run/netns").mkdir()
    images = _images(settings["images"])
    folder = Path(settings["folder"])
    with Cluster(Path(settings["programs"]), folder, settings["cgroup"]) as cluster:
        stage = Stage(cluster, images, folder, began_s=began_s)
        stage.say("API server is ready")
        cluster.load_images([images.sandbox, images.current.archive])
        code = _run(stage, settings["scenarios"])
        if settings["is_held"]:
            stage.say("the cluster stays until Ctrl-C")
            signal.pause()
    return code


def _run(stage: Stage, names: list[str]) -> int:
    for name in names:
        stage.say(f"scenario {name}")
        try:
            SCENARIOS[name](stage)
        except Exception:  # noqa: BLE001 - any failure ends the run, with a description of the cluster
            traceback.print_exc()
            print(describe(stage.cluster), flush=True)
            print(f"scenario {name} failed", flush=True)
            return 1
    return 0


def _images(settings: dict[str, Any]) -> ClusterImages:
    current, successor, first = (
        ImageSet(given["tag"], Path(given["archive"])) if given else None
        for given in map(settings.get, ("current", "successor", "first"))
    )
    assert current
    assert successor
    return ClusterImages(Path(settings["sandbox"]), current, successor, first)


if __name__ == "__main__":
    sys.exit(main())
