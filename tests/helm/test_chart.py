"""The chart against Helm's lint, the schemas of Kubernetes, and the loaders of the real daemons."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validation
from tests.helm.rendering import CHART, EXAMPLES, TRIAL, Manifest, helm, merged, read_settings, render

from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_fabric.sockets.tls import Tls, TlsFiles

VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
FOREIGN = {"cert-manager.io/v1"}
"""Kinds of other projects, without schemas here."""

EXTERNAL = {"etcd": {"endpoints": ["etcd-0:2379"]}}
OPTIONAL = merged(
    TRIAL,
    {
        "agent": {"hugePages": True},
        "service": {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]},
    },
)
"""Values that no example has, for schemas."""


@pytest.fixture(scope="module")
def trial() -> Manifest:
    return render(TRIAL)


def test_helm_finds_no_fault_in_the_chart() -> None:
    report = helm.lint(CHART, dict(TRIAL), strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each file of schemas once in a test, instead of once for each object."""
    monkeypatch.setattr(validation, "schema_contents", cache(validation.schema_contents))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_valid_in_each_version_of_kubernetes(version: str, schemas: None) -> None:
    kinds = set()
    for values in (*EXAMPLES.values(), OPTIONAL):
        for each in render(merged(values, {"kubeVersion": version})).objects:
            if each["apiVersion"] not in FOREIGN:
                kubernetes_validate.validate(each, f"{version}.0", strict=True)
                kinds.add(each["kind"])
    assert len(kinds) >= 11


def test_an_engine_of_the_examples_is_valid(schemas: None) -> None:
    deployment = yaml.safe_load((CHART.parent / "examples/objects/vllm-deployment.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(deployment, f"{version}.0", strict=True)


def test_a_daemon_reads_its_file_of_settings(trial: Manifest, tmp_path: Path) -> None:
    agent = read_settings(DaemonSettings, trial.settings("agent"), tmp_path)
    assert agent.etcd.endpoints == ("kv-etcd-0.kv-etcd.ml.svc.cluster.local:2379",)
    assert agent.etcd.awaits_fabric
    assert agent.socket_permissions() == 0o666
    assert agent.memory.cache_bytes + agent.memory.reserve_bytes == 640 << 20
    enclosure = read_settings(EnclosureDaemonSettings, trial.settings("enclosure"), tmp_path)
    assert (enclosure.file_drives, enclosure.file_drive_bytes) == (2, 1 << 30)
    admin = read_settings(AdminSettings, trial.settings("admin"), tmp_path)
    assert admin.tls.cert == "/etc/ostraca/tls/tls.crt"


def test_agents_and_the_admin_service_read_their_certificate(tmp_path: Path) -> None:
    manifest = render(merged(TRIAL, {"tls": {"agents": True}}))
    agent = read_settings(DaemonSettings, manifest.settings("agent"), tmp_path)
    admin = read_settings(AdminSettings, manifest.settings("admin"), tmp_path)
    assert agent.tls == admin.tls
    assert agent.tls.peer_name == "kv-agent.ml.svc.cluster.local"
    assert agent.listen[-1] == "tls://[::]:7400"
    secret = manifest.get("Secret", "tls")["data"]
    for name, file in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key")):
        assert getattr(agent.tls, name) == f"/etc/ostraca/tls/{file}"
        (tmp_path / file).write_bytes(base64.b64decode(secret[file]))
    hosts = ["kv-agent.ml.svc.cluster.local", "kv-admin.ml.svc.cluster.local", "127.0.0.1"]
    Tls(TlsFiles(tmp_path / "ca.crt", tmp_path / "tls.crt", tmp_path / "tls.key"), hosts)


def test_further_settings_reach_the_daemon(tmp_path: Path) -> None:
    further = {
        "owner": {"blocks_per_shard_max": 1 << 24, "endurance": {"rated_dwpd": 0.3}},
        "turn_s": "500ms",
    }
    manifest = render(merged(TRIAL, {"agent": {"settings": further}}))
    agent = read_settings(DaemonSettings, manifest.settings("agent"), tmp_path)
    assert (agent.owner.blocks_per_shard_max, agent.owner.endurance.rated_dwpd, agent.turn_s) == (
        1 << 24,
        0.3,
        0.5,
    )


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({}, "list host:port of each member in etcd.endpoints"),
        (merged(TRIAL, EXTERNAL), "etcd.trial.enabled and etcd.endpoints exclude each other"),
        (merged(TRIAL, {"agent": {"memory": "512Mi", "overhead": "400Mi"}}), "raise agent.memory"),
        (merged(TRIAL, {"agent": {"overhead": "64Mi"}}), "raise agent.overhead"),
        (merged(TRIAL, {"agent": {"nvme": {"fast_io_fail_s": 30}}}), "a write may arrive 70 s late"),
        (
            merged(TRIAL, {"agent": {"settings": {"drain_s": 5}}}),
            "agent.settings.drain_s is derived by the chart",
        ),
        (merged(TRIAL, {"agent": {"mode": "dpu"}}), "list the agents in worker.agents"),
        (merged(TRIAL, {"enclosure": {"nvmet": {"enabled": True}}}), "exclude each other"),
        (merged(EXTERNAL, {"secrets": {"existingSecret": "mine"}}), "needs secrets.existingWorkerSecret"),
        (merged(TRIAL, {"agent": {"memory": "4GB"}}), 'the size "4GB" is invalid: write .* as in 4Gi'),
        (merged(TRIAL, {"worker": {"vllm": {"cpuBytes": "8"}}}), 'the size "8" is invalid'),
        (merged(TRIAL, {"agent": {"nvme": {"kernel": True}}}), "set agent.runAsUser=0"),
        (merged(TRIAL, {"admin": {"enabled": False}}), "set admin.enabled=true"),
        (merged(TRIAL, {"agent": {"hugePages": "yes"}}), "hugePages"),
        (
            merged(TRIAL, {"agent": {"settings": {"memory": {"huge_pages": True}}}}),
            "set agent.hugePages instead",
        ),
        (
            merged(TRIAL, {"service": {"ipFamilies": ["IPv6", "IPv4"]}}),
            "set service.ipFamilyPolicy to PreferDualStack",
        ),
        (merged(TRIAL, {"service": {"ipFamilies": ["IPv5"]}}), "must be one of 'IPv4', 'IPv6'"),
        (merged(TRIAL, {"agent": {"memry": "1Gi"}}), "'memry' not allowed"),
        (merged(TRIAL, {"agent": {"settings": {"advertise": ["tcp://a:1"]}}}), "advertise has no effect"),
        (
            merged(
                TRIAL, {"monitoring": {"podMonitor": {"enabled": True}}, "networkPolicy": {"enabled": True}}
            ),
            "list Prometheus' pods in networkPolicy.scrapers",
        ),
        (merged(TRIAL, {"fullnameOverride": "1kv"}), "'1kv' does not match pattern"),
        (merged(TRIAL, {"agent": {"ports": {"peers": 9464}}}), "both of agent.ports are the same"),
        (merged(TRIAL, {"commonLabels": {"app.kubernetes.io/component": "kv"}}), "is a label of the chart"),
        (merged(TRIAL, {"etcd": {"trial": {"replicas": 2}}}), "must be one of 1, 3"),
    ],
)
def test_values_that_cannot_work_are_refused_with_advice(values: Mapping[str, Any], remedy: str) -> None:
    with pytest.raises(helm.HelmError, match=remedy):
        render(values)
