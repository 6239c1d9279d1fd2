"""Rules of PodSecurity "restricted" for rendered pods, and two rules of this project.

https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.helm.rendering import Object, containers

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"}
_ADMITTED = {*_VOLUMES, "secret"}


def broken_rules(pod: Object) -> set[str]:
    """Return the names of the rules that a pod breaks."""
    return {name for name, rule in RULES.items() if not rule(pod)}


def _of_both(pod: Object, field: str) -> Iterator[Any]:
    """Yield a field of each container's security context, or the pod's where the container has none."""
    of_pod = pod.get("securityContext", {})
    for each in containers(pod):
        own = each.get("securityContext", {})
        yield own[field] if field in own else of_pod.get(field)


def _of_containers(pod: Object, field: str) -> list[Any]:
    return [each.get("securityContext", {}).get(field) for each in containers(pod)]


def _capabilities(pod: Object) -> bool:
    found = [each or {} for each in _of_containers(pod, "capabilities")]
    return all(
        each.get("drop") == ["ALL"] and set(each.get("add", ())) <= {"NET_BIND_SERVICE"} for each in found
    )


RULES: Mapping[str, Callable[[Object], bool]] = {
    "hostNetwork": lambda pod: not pod.get("hostNetwork"),
    "hostPID": lambda pod: not pod.get("hostPID"),
    "hostIPC": lambda pod: not pod.get("hostIPC"),
    "hostPorts": lambda pod: (
        not any("hostPort" in port for each in containers(pod) for port in each.get("ports", []))
    ),
    "hostPath": lambda pod: not any("hostPath" in each for each in pod.get("volumes", [])),
    "volumes": lambda pod: all(
        set(each) - {"name"} <= {*_ADMITTED, "hostPath"} for each in pod.get("volumes", [])
    ),
    "privileged": lambda pod: not any(_of_containers(pod, "privileged")),
    "allowPrivilegeEscalation": lambda pod: all(
        each is False for each in _of_containers(pod, "allowPrivilegeEscalation")
    ),
    # A privileged container has all capabilities, which its own rule reports.
    "capabilities": lambda pod: any(_of_containers(pod, "privileged")) or _capabilities(pod),
    "runAsNonRoot": lambda pod: all(each is True for each in _of_both(pod, "runAsNonRoot")),
    "runAsUser": lambda pod: all(each != 0 for each in _of_both(pod, "runAsUser")),
    "seccompProfile": lambda pod: all(
        (each or {}).get("type") == "RuntimeDefault" for each in _of_both(pod, "seccompProfile")
    ),
    "readOnlyRootFilesystem": lambda pod: all(_of_containers(pod, "readOnlyRootFilesystem")),
    "automountServiceAccountToken": lambda pod: pod.get("automountServiceAccountToken") is False,
}
