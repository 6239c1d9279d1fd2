"""State of the cluster after a failure, for a reader of the log."""

from __future__ import annotations

from typing import Any

from tests.kube.cluster.cluster import Cluster
from tests.kube.cluster.kubectl import Kubectl
from tests.kube.cluster.processes import ClusterError

_LINES = "30"
_QUIET_PHASES = {"Succeeded"}


def describe(cluster: Cluster) -> str:
    """Return nodes, pods, warnings, and the last lines of pods that are not ready."""
    kubectl = cluster.kubectl
    parts = [
        _request(kubectl, "get", "nodes,pods", "--all-namespaces", "--output=wide"),
        _request(kubectl, "get", "events", "--all-namespaces", "--field-selector=type=Warning"),
    ]
    try:
        pods = kubectl.list("pods", is_anywhere=True)
    except ClusterError as error:
        return "\n".join([*parts, str(error)])
    for pod in pods:
        if not _is_quiet(pod):
            within = kubectl.within(pod["metadata"]["namespace"])
            name = pod["metadata"]["name"]
            parts.append(f"--- logs of {name}")
            parts.append(_request(within, "logs", name, "--all-containers", f"--tail={_LINES}"))
            if any(status.get("restartCount") for status in pod["status"].get("containerStatuses", [])):
                words = ("--all-containers", "--previous", f"--tail={_LINES}")
                parts.append(_request(within, "logs", name, *words))
    return "\n".join(parts)


def _is_quiet(pod: Any) -> bool:
    if pod["status"].get("phase") in _QUIET_PHASES:
        return True
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all(status["ready"] and not status["restartCount"] for status in statuses)


def _request(kubectl: Kubectl, *words: str) -> str:
    try:
        return kubectl.run(*words)
    except ClusterError as error:
        return str(error)
