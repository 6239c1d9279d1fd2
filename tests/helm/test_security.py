"""Privileges of pods, and secrets in objects."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml
from tests.helm.pod_security import RULES, broken_rules
from tests.helm.rendering import CHART, EXAMPLES, TRIAL, Object, containers, merged, render
from tests.support.pod.sought import Sought

DEVIATIONS: Mapping[str, Mapping[str, str]] = yaml.safe_load((CHART / "deviations.yaml").read_text())
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **EXAMPLES,
    "host": merged(TRIAL, {"agent": {"socket": {"prepare": False}, "hostPID": True, "hostNetwork": True}}),
    "profile": merged(TRIAL, {"agent": {"seccompLocalhostProfile": "ostraca/io-uring.json"}}),
    "three members": merged(TRIAL, {"etcd": {"trial": {"replicas": 3}}}),
    "registration": merged(TRIAL, {"enclosures": [{"name": "shelf-1", "controllers": ["tcp://10.0.0.1"]}]}),
}

SOUND: Object = {
    "automountServiceAccountToken": False,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "volumes": [{"name": "tmp", "emptyDir": {}}],
    "containers": [
        {
            "name": "sound",
            "ports": [{"containerPort": 1}],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
}


def _context(pod: Object) -> Object:
    context: Object = pod["containers"][0]["securityContext"]
    return context


BREAKING: Mapping[str, Callable[[Object], object]] = {
    "hostNetwork": lambda pod: pod.update(hostNetwork=True),
    "hostPID": lambda pod: pod.update(hostPID=True),
    "hostIPC": lambda pod: pod.update(hostIPC=True),
    "hostPorts": lambda pod: pod["containers"][0]["ports"][0].update(hostPort=1),
    "hostPath": lambda pod: pod["volumes"].append({"name": "dev", "hostPath": {"path": "/dev"}}),
    "volumes": lambda pod: pod["volumes"].append({"name": "nfs", "nfs": {"server": "s", "path": "/"}}),
    "privileged": lambda pod: _context(pod).update(privileged=True),
    "allowPrivilegeEscalation": lambda pod: _context(pod).pop("allowPrivilegeEscalation"),
    "capabilities": lambda pod: _context(pod)["capabilities"].update(add=["IPC_LOCK"]),
    "runAsNonRoot": lambda pod: pod["securityContext"].pop("runAsNonRoot"),
    "runAsUser": lambda pod: _context(pod).update(runAsUser=0),
    "seccompProfile": lambda pod: pod["securityContext"].pop("seccompProfile"),
    "readOnlyRootFilesystem": lambda pod: _context(pod).pop("readOnlyRootFilesystem"),
    "automountServiceAccountToken": lambda pod: pod.pop("automountServiceAccountToken"),
}


def test_a_sound_pod_breaks_no_rule_and_each_rule_has_an_example() -> None:
    assert broken_rules(SOUND) == set()
    assert BREAKING.keys() == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_a_pod_that_breaks_one_rule_is_told_by_this_rule(rule: str) -> None:
    pod = copy.deepcopy(SOUND)
    BREAKING[rule](pod)
    assert broken_rules(pod) == {rule}


def test_pods_deviate_from_restricted_as_the_list_says_and_no_further() -> None:
    found: dict[str, set[str]] = {}
    for values in VARIANTS.values():
        for component, pod in render(values).pods_by_component():
            found.setdefault(component, set()).update(broken_rules(pod))
    assert {component: rules for component, rules in found.items() if rules} == {
        component: set(rules) for component, rules in DEVIATIONS.items()
    }
    assert {"admin", "etcd", "fabric", "registration", "test"} <= found.keys()


def test_the_trial_needs_no_privileges_beside_two_folders_of_the_node() -> None:
    for component, pod in render(TRIAL).pods_by_component():
        prepared = {"capabilities", "hostPath", "runAsNonRoot", "runAsUser"}
        assert broken_rules(pod) == (prepared if component in DEVIATIONS else set()), component
        daemons = {**pod, "initContainers": [], "volumes": []}
        assert broken_rules(daemons) == set(), component


@pytest.mark.parametrize("name", VARIANTS)
def test_no_secret_shows_outside_of_secrets(name: str) -> None:
    manifest = render(VARIANTS[name])
    sought = Sought()
    for each in manifest.objects:
        where = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Secret":
            for key, value in each["data"].items():
                if key not in {"ca.crt", "tls.crt"}:
                    sought.secrets |= _parts(f"{where} {key}", base64.b64decode(value))
        else:
            sought.look_at(where, json.dumps(each))
    sought.look_at("NOTES", manifest.notes)
    assert sought.found() == []
    if name == "trial":
        assert len(sought.secrets) >= 7, "key, tokens of fabric, worker and admin, and a private key"
        where, secret = next(iter(sought.secrets.items()))
        sought.look_at("a careless object", json.dumps({"env": base64.b64encode(secret).decode()}))
        assert any(where in each for each in sought.found()), "the search finds what it has to find"


def test_secrets_are_mounted_closed_to_other_users_and_never_in_the_environment() -> None:
    for values in VARIANTS.values():
        for name, pod in render(values).pods():
            for each in containers(pod):
                sources = [entry.get("valueFrom", {}) for entry in each.get("env", [])]
                assert not any("secretKeyRef" in source for source in sources), name
                assert not each.get("envFrom"), name
            for volume in pod.get("volumes", []):
                if "secret" in volume and not _is_public(volume["secret"]):
                    assert volume["secret"]["defaultMode"] == 0o440, (name, volume)


def _is_public(secret: Object) -> bool:
    return [item["key"] for item in secret.get("items", [])] == ["ca.crt"]


def _parts(name: str, content: bytes) -> dict[str, bytes]:
    """Return the secrets in a file: quoted words of TOML, a line of PEM, or the whole content."""
    if name.endswith(".toml"):
        words = content.split(b'"')[1::2]
        return {f"{name} {number}": word for number, word in enumerate(words) if len(word) >= 16}
    if b"PRIVATE KEY" in content:
        return {name: content.splitlines()[1]}
    return {name: content}
