"""Control plane: etcd, API server, controllers, scheduler and DNS, as processes beside the test."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.fabric.membership.nodes import program
from tests.kube.cluster.addresses import API, API_PORT, CONTROL_PLANE, SERVICES
from tests.kube.cluster.credentials import Credentials
from tests.kube.cluster.processes import ClusterError, LoggedProcess, run, wait_until

NODE_LOST_S = 16
"""Silence of a kubelet after which controllers call its node NotReady."""

EVICTION_S = 20
"""Time on a lost node after which controllers replace a pod."""

_READY_S = 180.0


class ControlPlane:
    """Processes of the control plane. Use as a context manager."""

    def __init__(self, programs: Path, folder: Path, credentials: Credentials) -> None:
        self._programs = programs
        self._folder = folder
        self._credentials = credentials
        self._stack = ExitStack()
        self._processes: list[LoggedProcess] = []

    def __enter__(self) -> Self:
        """Start all processes; return when the API server is ready."""
        try:
            self._start_etcd()
            self._start_api_server()
            wait_until(self._is_ready, _READY_S, "API server")
            self._start_clients()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, the last one first."""
        self._stack.close()

    def check(self) -> None:
        """Raise ClusterError if a process has ended."""
        for process in self._processes:
            if not process.is_running:
                raise ClusterError(f"{process.name} has ended: see {process.log}")

    def _start(self, name: str, *words: str | Path) -> None:
        process = LoggedProcess(name, [str(word) for word in words], self._folder / f"{name}.log")
        self._stack.callback(process.end)
        self._processes.append(process)

    def _start_etcd(self) -> None:
        etcd = program()
        assert etcd is not None, "the command checks for etcd first"
        client, peer = f"http://{CONTROL_PLANE}:2379", "http://127.0.0.1:2380"
        self._start(
            *("etcd", etcd, "--data-dir", self._folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
        )

    def _start_api_server(self) -> None:
        key = self._folder / "service-accounts.key"
        run("openssl", "genrsa", "-out", str(key), "2048")
        self._start(
            *("kube-apiserver", self._programs / "kube-apiserver"),
            *("--etcd-servers", f"http://{CONTROL_PLANE}:2379", "--service-cluster-ip-range", SERVICES),
            *("--bind-address", CONTROL_PLANE, "--advertise-address", CONTROL_PLANE),
            *("--secure-port", str(API_PORT), "--insecure-port", "0"),
            *("--cert-dir", self._credentials.certificates),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-signing-key-file", key, "--service-account-key-file", key),
            *("--token-auth-file", self._credentials.tokens, "--authorization-mode", "Node,RBAC"),
            *("--enable-admission-plugins", "NodeRestriction", "--allow-privileged=true"),
            *("--kubelet-preferred-address-types", "InternalIP"),
        )

    def _start_clients(self) -> None:
        admin = self._credentials.kubeconfig("admin")
        run(
            *("kubectl", "--kubeconfig", str(admin), "create", "clusterrolebinding", "test:proxy"),
            *("--clusterrole", "system:node-proxier", "--user", "system:kube-proxy"),
        )
        self._start(
            *("kube-controller-manager", self._programs / "kube-controller-manager"),
            *("--kubeconfig", self._credentials.kubeconfig("controllers"), "--leader-elect=false"),
            *("--service-account-private-key-file", self._folder / "service-accounts.key"),
            *("--root-ca-file", self._credentials.certificates / "apiserver.crt"),
            *("--node-monitor-grace-period", f"{NODE_LOST_S}s", "--node-monitor-period", "2s"),
            *("--pod-eviction-timeout", f"{EVICTION_S}s", "--bind-address", "127.0.0.1", "--port", "0"),
            *("--controllers", "*,-nodeipam,-route,-service"),
        )
        self._start(
            *("kube-scheduler", self._programs / "kube-scheduler"),
            *("--kubeconfig", self._credentials.kubeconfig("scheduler"), "--leader-elect=false"),
            *("--bind-address", "127.0.0.1", "--port", "0"),
        )
        self._start("dns", sys.executable, "-m", "tests.kube.cluster.dns", admin)

    def _is_ready(self) -> bool:
        self.check()
        certificate = self._credentials.certificates / "apiserver.crt"
        if not certificate.exists():
            return False
        try:
            context = ssl.create_default_context(cafile=str(certificate))
            with urllib.request.urlopen(f"{API}/readyz", context=context, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
