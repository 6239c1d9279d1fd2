"""Workers in pods: each puts and gets blocks by the SDK of its image, and checks each byte."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from tests.kube.cluster.node import Node
from tests.kube.cluster.processes import ClusterError, wait_until
from tests.kube.release import HelmRelease

_ROOT = Path(__file__).parents[2]
_MODULES = ("tests/support/stalls.py", "tests/support/pod/work.py", "tests/support/pod/worker.py")
_FOLDER = "/opt/tests"
_SCRIPTS = "worker-scripts"
_RUN = "/run/ostraca"
_TOKEN = "/etc/ostraca/worker"
_READY_S = 60.0
_PUTS_S = 120.0
_HITS_S = 120.0


class PodWorker:
    """Worker in a pod of its own on one node. Use as a context manager."""

    def __init__(self, release: HelmRelease, node: Node, image: str) -> None:
        """Prepare a worker with the agent of its node first, and all others as second."""
        self.reasons: Counter[str] = Counter()
        """Reasons of all misses."""

        self._kubectl = release.kubectl
        self._name = f"worker-{node.name}"
        self._objects = [_scripts(), _pod(self._name, release, node, image)]
        self._addresses = [f"unix://{_RUN}/agent.sock", f"tcp://{release.name}-agent:7400"]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Create the pod and start the worker."""
        self._kubectl.apply(self._objects)
        ready = ("wait", f"pod/{self._name}", "--for=condition=Ready", f"--timeout={_READY_S:.0f}s")
        self._kubectl.run(*ready, within_s=_READY_S + 5)
        script = ("env", f"PYTHONPATH={_FOLDER}", "python3", "-m", "tests.support.pod.worker", "inline")
        command = self._kubectl.command("exec", "-i", self._name, "--", *script, *self._addresses)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the worker and delete the pod."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        self._kubectl.run("delete", "pod", self._name, "--force", "--grace-period=0", "--ignore-not-found")

    def put(self, chains: Iterable[int], *, deadline_s: float = 5.0) -> list[int]:
        """Put chains; return those that are whole and committed."""
        done: list[int] = self._ask("put", chains, deadline_s)
        return done

    def put_all(self, chains: Iterable[int]) -> None:
        """Put chains until all are committed: owners decline puts while shards change hands."""
        left = list(chains)

        def put_rest() -> bool:
            done = self.put(left)
            left[:] = [chain for chain in left if chain not in done]
            return not left

        wait_until(put_rest, _PUTS_S, "puts of all chains")

    def wait_hits(self, chains: Iterable[int]) -> float:
        """Get chains until all of them hit; return the seconds."""
        left = list(chains)

        def get_rest() -> bool:
            left[:] = self.missing(left)
            return not left

        return wait_until(get_rest, _HITS_S, "hits of all chains")

    def missing(self, chains: Iterable[int], *, deadline_s: float = 5.0) -> list[int]:
        """Get chains; return those that are not whole. A wrong byte fails the scenario."""
        gone: list[int]
        gone, reasons = self._ask("get", chains, deadline_s)
        self.reasons.update(reasons)
        return gone

    def _ask(self, verb: str, chains: Iterable[int], deadline_s: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([verb, list(chains), deadline_s]), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            _, errors = process.communicate()
            raise ClusterError(f"{self._name} has ended: {errors[-3000:]}")
        return json.loads(answer)


def _scripts() -> dict[str, Any]:
    data = {name.replace("/", "."): (_ROOT / name).read_text() for name in _MODULES}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _SCRIPTS}, "data": data}


def _pod(name: str, release: HelmRelease, node: Node, image: str) -> dict[str, Any]:
    items = [{"key": path.replace("/", "."), "path": path} for path in _MODULES]
    socket = f"{_RUN}/{release.name}/{release.name}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/component": "test-worker"}},
        "spec": {
            "nodeName": node.name,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "worker",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "env": [{"name": "OSTRACA_TOKEN_FILE", "value": f"{_TOKEN}/token"}],
                    "volumeMounts": [
                        {"name": "run", "mountPath": _RUN},
                        {"name": "token", "mountPath": _TOKEN},
                        {"name": "scripts", "mountPath": _FOLDER},
                    ],
                }
            ],
            "volumes": [
                {"name": "run", "hostPath": {"path": socket, "type": "Directory"}},
                {"name": "token", "secret": {"secretName": f"{release.name}-worker"}},
                {"name": "scripts", "configMap": {"name": _SCRIPTS, "items": items}},
            ],
        },
    }
