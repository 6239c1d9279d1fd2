"""Rendered objects: shutdown, health, memory, identity, updates, and what engines read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.rendering import (
    EXAMPLES,
    ROOT,
    TRIAL,
    Manifest,
    Object,
    containers,
    helm,
    merged,
    read_settings,
    render,
)

from ostraca.connectors.sglang.settings import SglangSettings
from ostraca.connectors.vllm.settings import TierSettings
from ostraca_admin.api.probes import ANSWER_S
from ostraca_cli import program
from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_cli.composition.memory_fit import OWN_BYTES
from ostraca_fabric.sockets.default_paths import ADMIN_URL_VARIABLE, TLS_VARIABLES

OBJECTS = ROOT / "helm" / "examples" / "objects"
OF_VLLM = {"type", "module_path"}
SGLANG = (ROOT / "docs" / "howto" / "engines" / "sglang.md").read_text()
PAGE_ON_SGLANG = json.loads(SGLANG.partition("```json")[2].partition("```")[0])
del PAGE_ON_SGLANG["ostraca"]


@pytest.fixture(scope="module")
def trial() -> Manifest:
    return render(TRIAL)


def pod_of(manifest: Manifest, kind: str, name: str) -> Object:
    pod: Object = manifest.get(kind, name)["spec"]["template"]["spec"]
    return pod


def main_of(manifest: Manifest, kind: str, name: str) -> Object:
    (main,) = pod_of(manifest, kind, name)["containers"]
    found: Object = main
    return found


@pytest.mark.parametrize("drain_s", [1, 10, 60])
def test_the_grace_period_outlasts_the_shutdown_of_the_agent(drain_s: int, tmp_path: Path) -> None:
    manifest = render(merged(TRIAL, {"agent": {"drain_s": drain_s}}))
    settings = read_settings(DaemonSettings, manifest.settings("agent"), tmp_path)
    assert settings.drain_s == drain_s
    pod = pod_of(manifest, "DaemonSet", "agent")
    assert pod["terminationGracePeriodSeconds"] > settings.stop_limit_s


@pytest.mark.parametrize(
    ("kind", "name", "port"),
    [("DaemonSet", "agent", "http"), ("DaemonSet", "enclosure", "http"), ("Deployment", "admin", "https")],
)
def test_a_daemon_has_three_probes_of_two_pages(trial: Manifest, kind: str, name: str, port: str) -> None:
    main = main_of(trial, kind, name)
    probes = [main[f"{each}Probe"] for each in ("startup", "liveness", "readiness")]
    assert [each["httpGet"]["path"] for each in probes] == ["/healthz", "/healthz", "/readyz"]
    assert {each["httpGet"]["port"] for each in probes} == {port}
    assert {each["httpGet"].get("scheme", "HTTP") for each in probes} == {port.upper()}
    assert min(each["timeoutSeconds"] for each in probes) > ANSWER_S
    startup, liveness, readiness = (each["periodSeconds"] * each["failureThreshold"] for each in probes)
    assert startup > liveness > readiness


@pytest.mark.parametrize(("memory", "overhead"), [("1Gi", "384Mi"), ("64Gi", "4Gi"), ("600Mi", "300Mi")])
def test_blocks_and_overhead_fill_the_memory_of_a_guaranteed_pod(
    memory: str, overhead: str, tmp_path: Path
) -> None:
    manifest = render(merged(TRIAL, {"agent": {"memory": memory, "overhead": overhead}}))
    pod = pod_of(manifest, "DaemonSet", "agent")
    for each in containers(pod):
        resources = each["resources"]
        assert resources["requests"] == resources["limits"], "QoS class Guaranteed"
        assert {"cpu", "memory"} <= resources["limits"].keys()
    settings = read_settings(DaemonSettings, manifest.settings("agent"), tmp_path).memory
    free_bytes = _bytes(memory) - _bytes(overhead)
    assert free_bytes - (32 << 20) < settings.mapped_bytes <= free_bytes
    assert _bytes(overhead) > OWN_BYTES


@pytest.mark.parametrize(("memory", "overhead"), [("1Gi", "384Mi"), ("64Gi", "4Gi"), ("605Mi", "300Mi")])
def test_huge_pages_and_memory_fill_the_size_of_a_guaranteed_pod(
    memory: str, overhead: str, tmp_path: Path
) -> None:
    values = merged(TRIAL, {"agent": {"memory": memory, "overhead": overhead, "hugePages": True}})
    manifest, without = render(values), render(merged(values, {"agent": {"hugePages": False}}))
    for each in containers(pod_of(manifest, "DaemonSet", "agent")):
        assert each["resources"]["requests"] == each["resources"]["limits"], "QoS class Guaranteed"
        assert {"cpu", "memory"} <= each["resources"]["limits"].keys()
    limits = main_of(manifest, "DaemonSet", "agent")["resources"]["limits"]
    huge_bytes, rest_bytes = _bytes(limits["hugepages-2Mi"]), _bytes(limits["memory"])
    assert huge_bytes + rest_bytes == _bytes(memory)
    assert rest_bytes >= _bytes(overhead)
    settings = read_settings(DaemonSettings, manifest.settings("agent"), tmp_path).memory
    assert (settings.huge_pages, settings.mapped_bytes) == (True, huge_bytes)
    before = read_settings(DaemonSettings, without.settings("agent"), tmp_path).memory
    assert settings == replace(before, huge_pages=True)
    assert "hugepages-2Mi" not in main_of(without, "DaemonSet", "agent")["resources"]["limits"]


def test_a_release_is_apart_from_releases_of_other_namespaces(trial: Manifest) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in trial.objects]
    assert len(names) == len(set(names))
    assert all(name.startswith("kv-") for _, name in names)
    assert {each["metadata"]["namespace"] for each in trial.objects} == {"ml"}
    folders = [
        volume["hostPath"]["path"]
        for _, pod in trial.pods()
        for volume in pod.get("volumes", [])
        if "hostPath" in volume
    ]
    assert sorted(folders) == ["/run/ostraca/ml/kv", "/var/lib/ostraca/ml/kv"]
    assert 'prefix = "/ostraca/ml/kv/"' in trial.settings("agent")


def test_each_object_has_the_recommended_labels_and_each_port_a_protocol(trial: Manifest) -> None:
    wanted = {"name", "instance", "component", "version", "part-of", "managed-by"}
    for each in trial.objects:
        labels = each["metadata"]["labels"]
        assert {f"app.kubernetes.io/{label}" for label in wanted} <= labels.keys()
    ports = [port for port in _ports(trial.objects) if isinstance(port, dict)]
    assert len(ports) > 8
    assert all(port["protocol"] == "TCP" for port in ports)


def test_an_object_of_a_hook_goes_after_its_success_and_a_failed_job_after_a_day(trial: Manifest) -> None:
    hooks = [each for each in trial.objects if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert sorted((each["kind"], each["metadata"]["name"]) for each in hooks) == [
        ("Job", "kv-registration"),
        ("Pod", "kv-test"),
    ]
    for each in hooks:
        policy = each["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert set(policy.split(",")) == {"before-hook-creation", "hook-succeeded"}
        assert each["kind"] == "Pod" or each["spec"]["ttlSecondsAfterFinished"] == 86_400


def test_one_pod_at_a_time_is_updated_or_none(trial: Manifest) -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert trial.get("DaemonSet", "agent")["spec"]["updateStrategy"] == rolling
    manual = render(merged(TRIAL, {"agent": {"updateStrategy": "OnDelete"}}))
    assert manual.get("DaemonSet", "agent")["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_a_change_of_settings_restarts_pods_and_a_change_of_secrets_does_not(trial: Manifest) -> None:
    def annotations(manifest: Manifest) -> Any:
        return manifest.get("DaemonSet", "agent")["spec"]["template"]["metadata"]["annotations"]

    assert annotations(render(TRIAL)) == annotations(trial), "the generated secrets differ"
    changed = render(merged(TRIAL, {"agent": {"settings": {"turn_s": 2}}}))
    assert annotations(changed) != annotations(trial)


@pytest.mark.parametrize("name", EXAMPLES)
def test_commands_of_pods_are_those_of_the_real_program(name: str) -> None:
    found = 0
    for where, pod in render(EXAMPLES[name]).pods():
        for each in containers(pod):
            first, *words = each.get("command", [])
            if first == "ostraca":
                program._parser().parse_args([*words, *each.get("args", [])])
                found += 1
            else:
                assert first in {"chown", "etcd", "python3"}, where
    assert found >= 2


def test_the_notes_name_commands_that_work_in_the_pod_of_the_admin_service(trial: Manifest) -> None:
    line = next(each for each in trial.notes.splitlines() if each.strip().startswith("ostraca "))
    options = program._parser().parse_args(line.split()[1:])
    admin = pod_of(trial, "Deployment", "admin")
    (fabric,) = (each["secret"] for each in admin["volumes"] if each["name"] == "fabric")
    (mount,) = (
        each["mountPath"] for each in containers(admin)[0]["volumeMounts"] if each["name"] == "fabric"
    )
    assert str(options.token_file) in {f"{mount}/{item['path']}" for item in fabric["items"]}
    assert "fabric.key" not in {item["key"] for item in fabric["items"]}, "the service can read no block"
    variables = {each["name"]: each["value"] for each in containers(admin)[0]["env"]}
    assert variables[ADMIN_URL_VARIABLE] == "https://localhost:7480"
    assert variables[TLS_VARIABLES[0]] == "/etc/ostraca/tls/ca.crt"


@pytest.mark.parametrize(("address", "host"), [("10.78.1.5", "10.78.1.5"), ("fd00::5", "[fd00::5]")])
@pytest.mark.parametrize("kind", [DaemonSettings, EnclosureDaemonSettings])
def test_variables_of_pods_are_settings(
    kind: Any, address: str, host: str, trial: Manifest, tmp_path: Path
) -> None:
    daemon = "agent" if kind is DaemonSettings else "enclosure"
    settings = read_settings(
        kind, trial.settings(daemon), tmp_path, _environment(trial, daemon, {"POD_IP": address})
    )
    if kind is DaemonSettings:
        assert settings.reached_at() == (f"tcp://{host}:7400",)
        assert settings.agent_id() == "node-1"
    else:
        assert [str(each) for each in settings.export_target().controllers] == [f"tcp://{host}:4420"]
        assert settings.enclosure_id() == "node-1"


@pytest.mark.parametrize(("address", "host"), [("10.77.0.11", "10.77.0.11"), ("fd00::11", "[fd00::11]")])
def test_drives_of_a_node_are_exported_at_its_address(address: str, host: str, tmp_path: Path) -> None:
    manifest = render(EXAMPLES["production"])
    environment = _environment(manifest, "enclosure", {"HOST_IP": address})
    settings = read_settings(EnclosureDaemonSettings, manifest.settings("enclosure"), tmp_path, environment)
    assert [str(each) for each in settings.export_target().controllers] == [f"tcp://{host}:4420"]


def test_daemons_listen_on_both_families_of_addresses(trial: Manifest, tmp_path: Path) -> None:
    agent = read_settings(DaemonSettings, trial.settings("agent"), tmp_path)
    enclosure = read_settings(EnclosureDaemonSettings, trial.settings("enclosure"), tmp_path)
    admin = read_settings(AdminSettings, trial.settings("admin"), tmp_path)
    assert agent.listen == ("unix:///run/ostraca/agent.sock", "tcp://[::]:7400")
    pages = (agent.http_listen, enclosure.http_listen, admin.listen)
    assert pages == ("[::]:9464", "[::]:9465", "[::]:7480")


@pytest.mark.parametrize(
    "service", [{}, {"ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}]
)
def test_all_services_have_the_families_of_the_values(service: dict[str, Any]) -> None:
    services = render(merged(TRIAL, {"service": service})).of_kind("Service")
    assert {each["metadata"]["name"] for each in services} == {"kv-admin", "kv-agent", "kv-etcd"}
    for each in services:
        spec = each["spec"]
        assert {name: spec[name] for name in spec if name.startswith("ipFamil")} == service


def test_no_pod_has_variables_of_services_which_daemons_would_take_for_settings(trial: Manifest) -> None:
    assert all(pod["enableServiceLinks"] is False for _, pod in trial.pods())


@pytest.mark.parametrize("name", ["trial", "production"])
def test_the_tier_of_vllm_reads_its_connection(name: str) -> None:
    values = merged(EXAMPLES[name], {"worker": {"vllm": {"revision": "r2", "settings": {"pin_s": 3}}}})
    manifest = render(values)
    connection = json.loads(manifest.get("ConfigMap", "worker")["data"]["vllm.json"])
    assert (connection["kv_connector"], connection["kv_load_failure_policy"]) == (
        "OffloadingConnector",
        "recompute",
    )
    extra = connection["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 8 << 30)
    (entry,) = extra["secondary_tiers"]
    tier = TierSettings.of({key: value for key, value in entry.items() if key not in OF_VLLM})
    scheme = "tls" if name == "production" else "tcp"
    assert tier.agents == (
        "unix:///run/ostraca/agent.sock",
        f"{scheme}://kv-agent.ml.svc.cluster.local:7400",
    )
    assert (tier.token_file, tier.revision, tier.pin_s) == ("/etc/ostraca/worker/token", "r2", 3.0)


@pytest.mark.parametrize("name", ["trial", "production"])
@pytest.mark.parametrize("prefix_keys", [True, False])
def test_the_backend_of_sglang_reads_its_connection(name: str, *, prefix_keys: bool) -> None:
    sglang = {"revision": "r2", "settings": {"pin_s": 3, "prefix_keys": prefix_keys}}
    manifest = render(merged(EXAMPLES[name], {"worker": {"tenant": "a", "sglang": sglang}}))
    connection = json.loads(manifest.get("ConfigMap", "worker")["data"]["sglang.json"])
    backend = SglangSettings.of(connection.pop("ostraca"))
    assert connection == PAGE_ON_SGLANG | {"hicache_storage_pass_prefix_keys": prefix_keys}
    scheme = "tls" if name == "production" else "tcp"
    assert backend.agents == (
        "unix:///run/ostraca/agent.sock",
        f"{scheme}://kv-agent.ml.svc.cluster.local:7400",
    )
    assert (backend.tenant, backend.token_file, backend.revision) == ("a", "/etc/ostraca/worker/token", "r2")
    assert (backend.pin_s, backend.prefix_keys) == (3.0, prefix_keys)
    assert backend.tls_ca == ("/etc/ostraca/ca/ca.crt" if name == "production" else "")


def test_the_connection_of_sglang_is_by_default_as_on_its_page() -> None:
    connection = json.loads(render(TRIAL).get("ConfigMap", "worker")["data"]["sglang.json"])
    assert SglangSettings.of(connection.pop("ostraca")).prefix_keys
    assert connection == PAGE_ON_SGLANG


@pytest.mark.parametrize("name", ["vllm-deployment", "dynamo-graph"])
def test_engines_of_the_examples_use_what_a_release_provides(name: str) -> None:
    engine = yaml.safe_load((OBJECTS / f"{name}.yaml").read_text())
    release = helm_release(engine["metadata"]["namespace"])
    if engine["kind"] == "Deployment":
        pod = engine["spec"]["template"]["spec"]
        (container,) = pod["containers"]
    else:
        pod = engine["spec"]["services"]["VllmDecodeWorker"]["extraPodSpec"]
        container = pod["mainContainer"]
    (variable,) = container["env"]
    reference = variable["valueFrom"]["configMapKeyRef"]
    names = {(each["kind"], each["metadata"]["name"]): each for each in release}
    config = names["ConfigMap", reference["name"]]
    assert json.loads(config["data"][reference["key"]])["kv_connector"] == "OffloadingConnector"
    assert f"--kv-transfer-config=$({variable['name']})" in container["args"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    agent = names["DaemonSet", "ostraca-agent"]
    sockets = [each for each in agent["spec"]["template"]["spec"]["volumes"] if each["name"] == "socket"]
    assert volumes["agent"]["hostPath"]["path"] == sockets[0]["hostPath"]["path"]
    assert "token" in names["Secret", volumes["token"]["secret"]["secretName"]]["data"]
    assert mounts == {"agent": "/run/ostraca", "token": "/etc/ostraca/worker"}


def test_workers_of_dynamo_announce_chunks_to_a_router_that_reads_announcements() -> None:
    text = (OBJECTS / "dynamo-graph.yaml").read_text()
    setting = re.search(r"--set worker\.vllm\.settings\.(\w+)=true", text)
    assert setting, "the example names the setting of the release"
    values = {"worker": {"vllm": {"settings": {setting[1]: True}}}}
    connection = json.loads(render(merged(TRIAL, values)).get("ConfigMap", "worker")["data"]["vllm.json"])
    extra = connection["kv_connector_extra_config"]
    (entry,) = extra["secondary_tiers"]
    tier = TierSettings.of({key: value for key, value in entry.items() if key not in OF_VLLM})
    assert (tier.enable_kv_events, extra["self_describing_kv_events"]) == (True, True)
    services = yaml.safe_load(text)["spec"]["services"]
    args = services["VllmDecodeWorker"]["extraPodSpec"]["mainContainer"]["args"]
    (events,) = (each.partition("=")[2] for each in args if each.startswith("--kv-events-config="))
    assert json.loads(events)["enable_kv_cache_events"], "or vLLM asks the tier for no announcements"
    assert json.loads(events)["publisher"] == "zmq", "or nothing leaves the process"
    (mode,) = services["Frontend"]["extraPodSpec"]["mainContainer"]["env"]
    assert mode == {"name": "DYN_ROUTER_MODE", "value": "kv"}
    plain = json.loads(render(TRIAL).get("ConfigMap", "worker")["data"]["vllm.json"])
    assert "self_describing_kv_events" not in plain["kv_connector_extra_config"]


def test_the_example_for_dpus_installs_the_values_for_dpus() -> None:
    service = yaml.safe_load((OBJECTS / "dpu-service.yaml").read_text())
    source = service["spec"]["helmChart"]
    assert source["values"] == EXAMPLES["dpu"]
    placed = {"serviceDaemonSet": {"nodeSelector": {"dpu": "yes"}, "labels": {"chain": "a"}}}
    daemon_set = render(merged(source["values"], placed)).get("DaemonSet", "agent")
    template = daemon_set["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"dpu": "yes"}
    assert template["metadata"]["labels"]["chain"] == "a"
    assert not any("hostPath" in each and each["name"] == "socket" for each in template["spec"]["volumes"])


@pytest.mark.parametrize(("cpu", "written"), [(8, "8"), (0.5, "0.5"), ("500m", "500m")])
def test_processors_may_be_a_number(cpu: object, written: str) -> None:
    manifest = render(merged(TRIAL, {"agent": {"cpu": cpu}}))
    resources = main_of(manifest, "DaemonSet", "agent")["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == (written, written)
    for prepared in pod_of(manifest, "DaemonSet", "agent").get("initContainers", []):
        assert prepared["resources"]["limits"]["cpu"] == written


def test_generated_secrets_outlive_the_release(trial: Manifest) -> None:
    secrets = trial.of_kind("Secret")
    assert {each["metadata"]["name"] for each in secrets} == {"kv-fabric", "kv-tls", "kv-worker"}
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in secrets} == {"keep"}


def test_existing_secrets_replace_all_generated_ones() -> None:
    manifest = render(EXAMPLES["production"])
    assert manifest.of_kind("Secret") == []
    names = {
        volume["secret"]["secretName"]
        for _, pod in manifest.pods()
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert {
        "kv-fabric",
        "kv-worker-token",
        "etcd-client",
        "etcd-password",
        "kv-nvme-hosts",
        "kv-tls",
    } == names


def test_each_container_that_registers_an_enclosure_has_a_valid_name_of_its_own() -> None:
    names = ("rack-1.a", "rack-1-a", "shelf--", "node" * 15 + "x", "node" * 15 + "y")
    enclosures = [{"name": name, "controllers": ["tcp://192.0.2.1:4420"]} for name in names]
    pod = pod_of(render(merged(TRIAL, {"enclosures": enclosures})), "Job", "registration")
    assert [each["name"] for each in pod["initContainers"]] == [f"add-{number}" for number in range(5)]
    assert [each["command"][-1] for each in pod["initContainers"]] == list(names)


def test_an_ingress_takes_a_wildcard_as_its_host() -> None:
    ingress = {"enabled": True, "host": "*.example.com", "tlsSecret": "wildcard"}
    spec = render(merged(TRIAL, {"admin": {"ingress": ingress}})).get("Ingress", "admin")["spec"]
    assert (spec["rules"][0]["host"], spec["tls"][0]["hosts"]) == ("*.example.com", ["*.example.com"])


def test_names_of_services_suit_dns_under_any_name_of_a_release() -> None:
    files = helm.Chart.load(ROOT / "helm" / "ostraca").render(dict(TRIAL), name="kv.eu", namespace="ml")
    (service,) = (text for name, text in files.items() if name.endswith("agent/service.yaml"))
    assert yaml.safe_load(service)["metadata"]["name"] == "kv-eu-agent"
    with pytest.raises(helm.HelmError, match="set fullnameOverride"):
        helm.Chart.load(ROOT / "helm" / "ostraca").render(dict(TRIAL), name="1kv", namespace="ml")


def test_the_notes_name_mounts_that_exist() -> None:
    dpu = {"agent": {"mode": "dpu"}, "worker": {"agents": ["tls://dpu-1:7400"]}, "tls": {"agents": True}}
    folder = "/run/ostraca/ml/kv of the node"
    certificate = "ca.crt of the Secret kv-tls in /etc/ostraca/ca"
    notes = [render(TRIAL).notes, render(merged(TRIAL, dpu)).notes]
    assert [(folder in each, certificate in each) for each in notes] == [(True, False), (False, True)]


def test_digests_replace_tags() -> None:
    digest = f"sha256:{'0' * 64}"
    manifest = render(merged(TRIAL, {"image": {"digests": {"agent": digest}, "tag": "2"}}))
    assert main_of(manifest, "DaemonSet", "agent")["image"] == f"ostraca-agent@{digest}"
    assert main_of(manifest, "StatefulSet", "etcd")["image"] == "ostraca-etcd:2"


def test_the_fabric_has_a_new_job_for_each_revision_and_for_each_change() -> None:
    def job(values: Any, revision: int = 1) -> str:
        (found,) = render(values, revision=revision).of_kind("Job")[:1]
        name: str = found["metadata"]["name"]
        return name

    alone = merged(TRIAL, {"enclosure": {"files": {"enabled": False}}})
    names = {job(alone), job(alone, 2), job(merged(alone, {"fabric": {"wait_s": 9}}))}
    assert len(names) == 3
    assert job(alone) in names


def test_older_versions_of_kubernetes_get_their_own_fields() -> None:
    budgets = {
        version: {each["apiVersion"] for each in _with(version).of_kind("PodDisruptionBudget")}
        for version in ("1.20", "1.25")
    }
    assert budgets == {"1.20": {"policy/v1beta1"}, "1.25": {"policy/v1"}}


def test_an_upgrade_leaves_etcd_alone_whose_records_end_with_its_pod() -> None:
    persistence = {"etcd": {"trial": {"enabled": True, "persistence": {"enabled": True}}}}
    for values, strategy in ((TRIAL, "OnDelete"), (persistence, "RollingUpdate")):
        etcd = render(values).get("StatefulSet", "etcd")
        assert etcd["spec"]["updateStrategy"]["type"] == strategy


def test_three_members_of_etcd_know_each_other() -> None:
    manifest = render(merged(TRIAL, {"etcd": {"trial": {"replicas": 3, "persistence": {"enabled": True}}}}))
    args = main_of(manifest, "StatefulSet", "etcd")["args"]
    host = "kv-etcd.ml.svc.cluster.local"
    members = ",".join(f"kv-etcd-{number}=http://kv-etcd-{number}.{host}:2380" for number in range(3))
    assert f"--initial-cluster={members}" in args
    assert {each["metadata"]["name"] for each in manifest.of_kind("PodDisruptionBudget")} == {
        "kv-admin",
        "kv-etcd",
    }


def test_further_objects_may_be_maps_or_texts_with_templates() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}"
    table = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-table"}}
    manifest = render(merged(TRIAL, {"extraObjects": [text, table]}))
    assert (
        manifest.get("ConfigMap", "text")["kind"] == manifest.get("ConfigMap", "table")["kind"] == "ConfigMap"
    )


def test_network_policies_close_all_ports_but_those_of_known_peers() -> None:
    manifest = render(EXAMPLES["production"])
    policies = {each["metadata"]["name"]: each["spec"] for each in manifest.of_kind("NetworkPolicy")}
    assert policies.keys() == {"kv-agent", "kv-admin", "kv-enclosure"}
    peers, pages = policies["kv-agent"]["ingress"]
    assert [each["port"] for each in peers["ports"]] == [7400]
    assert {"namespaceSelector": {"matchLabels": {"example.com/role": "inference"}}} in peers["from"]
    assert [each["port"] for each in pages["ports"]] == [9464]
    closed = render(merged(TRIAL, {"networkPolicy": {"enabled": True}}))
    (only,) = closed.get("NetworkPolicy", "agent")["spec"]["ingress"]
    assert [each["port"] for each in only["ports"]] == [7400], "without scrapers nobody reaches the pages"


def helm_release(namespace: str) -> list[Object]:
    """Return the objects of the release that the examples name."""
    files = helm.Chart.load(ROOT / "helm" / "ostraca").render(
        dict(TRIAL), name="ostraca", namespace=namespace
    )
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _with(version: str) -> Manifest:
    return render(merged(TRIAL, {"kubeVersion": version}))


def _bytes(quantity: str) -> int:
    units = {"Mi": 20, "Gi": 30}
    return int(quantity[:-2]) << units[quantity[-2:]]


def _environment(manifest: Manifest, daemon: str, values: dict[str, str]) -> dict[str, str]:
    """Return a daemon's variables, with the values of Kubernetes."""
    return {
        each["name"]: _expanded(each, values)
        for each in main_of(manifest, "DaemonSet", daemon)["env"]
        if each["name"] not in ("POD_IP", "HOST_IP")
    }


def _expanded(variable: Object, values: dict[str, str]) -> str:
    if "valueFrom" in variable:
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        return "node-1"
    text: str = variable["value"]
    for name, value in values.items():
        text = text.replace(f"$({name})", value)
    return text


def _ports(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "ports":
                yield from inner
            else:
                yield from _ports(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _ports(inner)
