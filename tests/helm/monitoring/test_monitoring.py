"""Objects of the chart for the Prometheus operator and for Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tests.helm.rendering import CHART, TRIAL, merged, render

RULES = CHART / "files" / "alerts.yaml"


def test_monitoring_is_off_by_default() -> None:
    manifest = render(TRIAL)
    assert manifest.of_kind("PodMonitor") == manifest.of_kind("PrometheusRule") == []
    assert not any(each["metadata"]["name"].endswith("-dashboards") for each in manifest.objects)


def test_monitors_select_the_pods_and_the_port_of_their_pages() -> None:
    manifest = render(
        merged(TRIAL, {"monitoring": {"podMonitor": {"enabled": True, "labels": {"team": "kv"}}}})
    )
    monitors = manifest.of_kind("PodMonitor")
    assert [each["metadata"]["name"] for each in monitors] == ["kv-agent", "kv-enclosure"]
    for each in monitors:
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        assert each["metadata"]["labels"]["team"] == "kv"
        template = manifest.get("DaemonSet", component)["spec"]["template"]
        wanted = each["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        (endpoint,) = each["spec"]["podMetricsEndpoints"]
        ports = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
        assert endpoint["port"] in ports
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"ostraca-{component}"}]


def test_rules_are_those_of_the_file_with_links_to_the_runbook() -> None:
    values = {"monitoring": {"prometheusRule": {"enabled": True, "runbooks": "https://docs.example/alerts"}}}
    (rule,) = render(merged(TRIAL, values)).of_kind("PrometheusRule")
    expected = yaml.safe_load(RULES.read_text().replace("RUNBOOKS", "https://docs.example/alerts"))
    assert rule["spec"] == expected


def test_dashboards_arrive_unchanged_for_the_sidecar() -> None:
    manifest = render(merged(TRIAL, {"monitoring": {"dashboards": {"enabled": True}}}))
    found = manifest.get("ConfigMap", "dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = sorted(Path(CHART / "files" / "dashboards").glob("*.json"))
    assert {name: json.loads(text) for name, text in found["data"].items()} == {
        f"ostraca-{each.name}": json.loads(each.read_text()) for each in files
    }
