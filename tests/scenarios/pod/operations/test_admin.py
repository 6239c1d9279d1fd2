"""The admin service as a process: whom it lets in, what it refuses, and what it does while etcd is away."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.fabric.membership.nodes import Cluster
from tests.support.pod.admin import Admin, token_of, write_people
from tests.support.pod.processes import UP_WITHIN_S, Pod, until

pytestmark = pytest.mark.slow


@pytest.fixture
def idle(own: Pod) -> Pod:
    """Return a fabric without enclosures and without agents."""
    own.create(enclosures=0)
    return own


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Pod]:
    """Return the same on a separate etcd, which may go away."""
    cluster = Cluster(tmp_path)
    try:
        with Pod(tmp_path, cluster) as pod:
            pod.create(enclosures=0)
            yield pod
    finally:
        cluster.close()


def test_over_tls_it_shows_its_certificate_and_takes_a_new_one(idle: Pod, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    files = ours.files("127.0.0.1")
    tls = [f"--set=tls.cert={files.cert}", f"--set=tls.key={files.key}", f"--set=tls.ca={files.ca}"]
    with Admin(idle, "admin-0", *tls, ca=ours.cert) as admin:
        assert admin.ask("GET", "/v1/map").status == 200
        admin.ask_as(theirs.cert)
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            admin.ask("GET", "/v1/map")
        new = theirs.files("127.0.0.1")
        for old, fresh in ((files.key, new.key), (files.cert, new.cert)):
            assert old is not None
            assert fresh is not None
            old.write_bytes(fresh.read_bytes())
        until(lambda: _answers(admin), "it shows its new certificate")
        admin.stop()
    admin.check_log()


def test_tokens_are_taken_and_taken_back_while_it_runs(idle: Pod) -> None:
    with Admin(idle) as admin:
        assert admin.ask("GET", "/v1/map", who="victor").status == 200
        assert admin.ask("GET", "/v1/map", token="nobody-nobody-nobody").status == 401
        refused = admin.ask("POST", "/v1/enclosures/shelf-1:drain", {}, who="victor")
        assert (refused.status, refused.body["detail"]) == (
            403,
            "victor has the role viewer, and this needs operator",
        )
        write_people(admin.people, {"viewer": {"wanda": token_of("wanda")}})
        until(lambda: admin.ask("GET", "/v1/map", who="wanda").status == 200, "a new token is taken")
        assert admin.ask("GET", "/v1/map", who="victor").status == 401
        admin.people.write_text("[viewer]\nwanda = 7\n")
        until(lambda: "is no valid file of people" in admin.log.read_text(), "a bad file is told")
        assert admin.ask("GET", "/v1/map", who="wanda").status == 200
        admin.stop()
    admin.check_log()


def test_who_follows_its_events_holds_up_its_end_no_longer_than_its_grace(idle: Pod) -> None:
    with Admin(idle) as admin:
        has_begun = threading.Event()

        def change() -> None:
            while not has_begun.wait(0.05):
                admin.ask("PUT", "/v1/tenants/acme", {"is_erasable": True})
                admin.ask("DELETE", "/v1/tenants/acme")

        changing = threading.Thread(target=change)
        shown = {"Authorization": f"Bearer {token_of('alice')}"}
        request = urllib.request.Request(f"{admin.url}/v1/events", headers=shown)
        with urllib.request.urlopen(request, timeout=UP_WITHIN_S) as stream:
            changing.start()
            assert stream.readline() == b"event: audit\n"
            has_begun.set()
            changing.join()
            admin.stop()
            assert b"DELETE /v1/tenants/acme" in stream.read()
    admin.check_log()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--listen", "0.0.0.0:0"], "without TLS would expose tokens"),
        (["--people", "/nowhere/people.toml"], "can't be read"),
        (["--prefix", "/ostraca/nobody/"], "ostraca fabric create"),
        (["--fabric", "0" * 31 + "1"], "check the endpoints"),
        (["--set", "limits.audit_max=0"], "1 or more"),
    ],
)
def test_what_it_can_not_work_with_it_refuses_with_what_to_do(
    idle: Pod, options: list[str], says: str
) -> None:
    assert says in Admin(idle, "admin-0", *options).refused()


def test_while_etcd_is_away_it_says_so_and_goes_on_when_it_is_back(alone: Pod) -> None:
    form = {"nqn": "nqn.2025-01.io.ostraca:shelf-1", "controllers": ["files:///nowhere"]}
    with Admin(alone) as admin:
        assert admin.probe("/readyz")[0] == 200
        alone.etcd.kill()
        until(lambda: admin.probe("/readyz")[0] == 503, "the service is not ready")
        assert admin.probe("/healthz") == (200, "ok\n")
        refused = admin.ask("PUT", "/v1/enclosures/shelf-1", form)
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
        assert "etcd" in refused.body["detail"]
        assert admin.ask("GET", "/v1/map").status == 200, "the map stays as it was"
        alone.etcd.start()
        until(lambda: admin.ask("GET", "/v1/enclosures").status == 200, "etcd answers again")
        until(lambda: admin.probe("/readyz")[0] == 200, "the service is ready again")
        failed = admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", form), state="failed")
        assert "the fabric has no agent" in failed["message"]
        admin.stop()
    admin.check_log()


def test_before_etcd_answers_it_lives_and_is_not_ready(alone: Pod) -> None:
    alone.etcd.kill()
    admin = Admin(alone)
    admin.launch()
    try:
        until(lambda: admin.probe("/healthz") == (200, "ok\n"), "the service lives")
        until(lambda: "Waiting for etcd, to find the fabric: " in admin.probe("/readyz")[1], "it says why")
        assert admin.probe("/readyz")[0] == 503
        assert admin.ask("GET", "/v1/map").status == 503
        alone.etcd.start()
        admin.await_ready()
        until(lambda: admin.probe("/readyz")[0] == 200, "the service is ready")
        admin.stop()
    finally:
        if admin.process is not None:
            admin.kill()
    admin.check_log()


def _answers(admin: Admin) -> bool:
    try:
        return admin.ask("GET", "/v1/map").status == 200
    except (urllib.error.URLError, ssl.SSLError):
        return False
