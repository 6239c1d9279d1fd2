"""No secret shows: a fabric with every kind of them is searched, with all that it says and keeps."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.fabric.fabric_host import hashes
from tests.support.pod.admin import PEOPLE, Admin, token_of
from tests.support.pod.enclosures import EnclosureProcess, dhchap_secret
from tests.support.pod.processes import UP_WITHIN_S, Pod, command
from tests.support.pod.secured import HOST, NVME_SECRETS, Files, pages_of, secret, with_tls
from tests.support.pod.sought import Sought
from tests.support.pod.work import await_puts, put_all

import ostraca
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.tables.digests import volume_secret

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Shelf:
    """An enclosure that asks hosts for a secret, and where secrets of it lie."""

    process: EnclosureProcess
    pages: str
    good: str
    bad: str
    hosts: Path
    shown: Path
    """What agents show it: the bad one at first."""


@pytest.fixture
def shelf(secured: Pod) -> Iterator[Shelf]:
    good, bad = dhchap_secret(), dhchap_secret()
    who = (f"nqn.2025-01.io.ostraca:host:{agent.name}" for agent in secured.agents)
    tables = (f'[hosts."{host}"]\nsecret = "{good}"' for host in who)
    hosts = secret(secured.folder / "hosts.toml", "\n".join(tables))
    (kept := secured.folder / NVME_SECRETS).mkdir()
    process = EnclosureProcess(
        *(secured, "shelf-1", "--drive-size", "66MiB", "--hosts", str(hosts)),
        *("--http", pages_of("shelf-1"), "--log-level", "debug"),
    )
    process.start()
    yield Shelf(process, pages_of("shelf-1"), good, bad, hosts, secret(kept / "shelf-1", bad))
    process.kill()


def test_no_secret_shows_in_logs_answers_etcd_arguments_or_files(
    secured: Pod, files: Files, shelf: Shelf
) -> None:
    """Search all output, answers and files of a fabric for its secrets.

    The fabric has every kind of secret, uses each rightly and wrongly, and logs at the finest level.
    """
    tokens = tomllib.loads((secured.files / "tokens.toml").read_text())
    own = with_tls(files.ours.files("admin", HOST))
    sought = _sought(secured, files, tokens, shelf)
    token = secret(secured.folder / "token", token_of("alice"))
    with Admin(secured, "admin-0", *own, "--log-level", "debug", ca=files.ours.cert) as admin:
        asking = ("--admin", admin.url, "--token-file", str(token), "--tls-ca", str(files.ours.cert))
        followed = _follow_events(asking, secured.folder / "events")
        _register(admin, shelf, sought)
        secured.await_settled()
        _come_as_workers(secured, files, tokens, shelf.bad, sought)
        _ask_all(sought, admin, secured, files)
        for words in (
            ("enclosure", "show", "shelf-1"),
            ("audit",),
            ("operation", "list"),
            ("fabric", "agents"),
        ):
            done = command(*words, *asking)
            assert done.returncode == 0, done.stderr
            sought.look_at(" ".join(words), done.stdout + done.stderr)
        for place in (shelf.pages, *(pages_of(agent.name) for agent in secured.agents)):
            for path in ("/metrics", "/healthz", "/readyz", "/status"):
                with urllib.request.urlopen(f"http://{place}{path}", timeout=10) as answer:
                    sought.look_at(f"{place}{path}", answer.read())
        for process in (shelf.process.process, admin.process, *(agent.process for agent in secured.agents)):
            assert process is not None
            sought.look_at_process(process.pid)
        followed.send_signal(signal.SIGINT)
        assert followed.wait(UP_WITHIN_S) == 130
        admin.stop()
    assert "shelf-1" in (secured.folder / "events").read_text(), "it was told"
    shelf.process.stop()
    for agent in secured.agents:
        agent.stop()
    sought.look_at("etcd", secured.etcd.ctl("get", "", "--from-key"))
    secured.etcd.close()
    # Its files of what was written, and its log. What users say to it, it writes itself.
    in_etcd = Sought({what: each for what, each in sought.secrets.items() if what != "etcd's password"})
    in_etcd.look_below(secured.etcd.nodes[0].folder, but={})
    assert in_etcd.found() == []
    holders = {
        secured.files / "fabric.key": "fabric key",
        secured.files / "tokens.toml": "fabric token",
        shelf.hosts: "NVMe secret",
        shelf.shown: "NVMe secret",
        admin.people: "alice's token",
        token: "alice's token",
    }
    sought.look_below(secured.folder, but=holders)
    assert len(sought.shown) > 50
    assert sought.found() == []


def _follow_events(asking: tuple[str, ...], said: Path) -> subprocess.Popen[bytes]:
    """Have all that happens written to a file."""
    with said.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "ostraca_cli", "events", "--json", *asking], stdout=out, stderr=out
        )


def _register(admin: Admin, shelf: Shelf, sought: Sought) -> None:
    """Have the enclosure onboarded, after all that people get wrong."""
    form = {
        "nqn": "nqn.2025-01.io.ostraca:shelf-1",
        "controllers": [f"files://{shelf.process.files}"],
        "secret": "shelf-1",
        "segment_bytes": 1 << 20,
    }
    told = admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", form), state="failed")
    assert told["message"].startswith("authenticated: 2 of 2 agents "), told
    secret(shelf.shown, shelf.good)
    admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", form))
    pasted = shelf.good
    for wrong in ({"secret": pasted}, {"secrets": pasted}, {"drives": [pasted]}):
        refused = admin.ask("PUT", "/v1/enclosures/shelf-2", {**form, **wrong})
        assert refused.status == 422
        sought.look_at(f"{list(wrong)} is refused", str(refused))
    sought.look_at("a token is refused", str(admin.ask("GET", "/v1/map", token=shelf.bad)))
    assert admin.ask("PUT", "/v1/tenants/acme", {"is_erasable": True}).status == 201


def _come_as_workers(secured: Pod, files: Files, tokens: dict[str, Any], wrong: str, sought: Sought) -> None:
    first, second = secured.agents
    with first.connect_from_elsewhere(tokens["tokens"]["default"][0], files.ours.cert) as client:
        await_puts(client)
        put_all(client)
    for token in (tokens["fabric"][0], wrong):
        with pytest.raises(ostraca.AuthenticationError) as told:
            second.connect_from_elsewhere(token, files.ours.cert)
        sought.look_at("a worker is refused", str(told.value))


def _sought(secured: Pod, files: Files, tokens: dict[str, Any], shelf: Shelf) -> Sought:
    key = (secured.files / "fabric.key").read_bytes()
    sought = Sought(
        {
            "fabric key": key,
            "tenant's token": tokens["tokens"]["default"][0].encode(),
            "fabric token": tokens["fabric"][0].encode(),
            "NVMe secret": shelf.good.encode(),
            "wrong NVMe secret": shelf.bad.encode(),
            "etcd's password": files.password.read_text().strip().encode(),
            **{f"{who}'s token": token_of(who).encode() for who in PEOPLE.values()},
        }
    )
    for incarnation in range(4):
        of_volume = volume_secret(key, tenant=TenantId("default"), name="v", incarnation=incarnation)
        sought.secrets[f"secret of v's incarnation {incarnation}"] = of_volume
    for path in files.etcd.ca.parent.glob("*.key"):
        sought.add_pem(path)
    return sought


def _ask_all(sought: Sought, admin: Admin, secured: Pod, files: Files) -> None:
    """Look at all that the admin service and the command line tell of a fabric."""
    lists = [
        path for path, acts in admin.ask("GET", "/v1/openapi.json").body["paths"].items() if "get" in acts
    ]
    named = ["/v1/enclosures/shelf-1", "/v1/tenants/acme", "/v1/volumes/default/v"]
    wanted = f"/v1/placement?tenant=default&volume=v&hash={hashes(1, 700)[0].hex()}"
    streamed = {"/v1/events", "/v1/placement"}
    for path in (*lists, *named, wanted):
        if "{" not in path and path not in streamed:
            answer = admin.ask("GET", path)
            assert answer.status == 200, (path, answer)
            sought.look_at(path, str(answer))
    tokens, ca = secured.files / "tokens.toml", files.ours.cert
    address = secured.agents[0].reached_at
    for words in (
        ("status", address, "--tokens", tokens, "--tls-ca", ca, "--json"),
        ("status", address, "--tokens", tokens, "--tls-ca", ca),
        ("metrics", secured.agents[0].address),
        ("explain", hashes(1, 700)[0].hex(), "--volume", "v", "--agent", secured.agents[0].address),
    ):
        done = command(*words)
        assert done.returncode == 0, done.stderr
        sought.look_at(" ".join(map(str, words)), done.stdout + done.stderr)
