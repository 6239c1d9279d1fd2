"""A fabric in which nothing crosses in the clear (``secured``).

What is wrong with any of what its members show each other is refused with what to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.fabric.fabric_host import hashes
from tests.support.pod.processes import AgentProcess, Pod, command, until
from tests.support.pod.secured import HOST, PREFIX, Files, towards_etcd, with_tls
from tests.support.pod.work import CHAINS, SMALL, await_puts, missing, put

import ostraca
from ostraca_fabric.sockets.tls import TlsFiles

pytestmark = pytest.mark.slow


def test_blocks_cross_between_agents_that_show_each_other_certificates(secured: Pod) -> None:
    first, second = secured.agents
    with first.connect() as writer, second.connect() as reader:
        await_puts(writer)
        assert put(writer) == list(CHAINS)
        assert missing(reader) == []
    assert set(secured.claims().values()) == {first.name, second.name}, "so half of them crossed"
    look = first.status()
    assert look is not None
    assert dict(look.agents)[second.name] == second.reached_at
    assert second.reached_at.startswith("tls://")


def test_a_worker_and_an_operator_elsewhere_come_over_tls_with_a_token(
    secured: Pod, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = secured.agents
    tokens = secured.files / "tokens.toml"
    token = tomllib.loads(tokens.read_text())["tokens"]["default"][0]
    with (
        first.connect_from_elsewhere(token, files.ours.cert) as writer,
        second.connect_from_elsewhere(token, files.ours.cert) as reader,
    ):
        await_puts(writer)
        written = range(700, 712)
        assert put(writer, written) == list(written)
        assert missing(reader, written) == []
    with pytest.raises(ostraca.AuthenticationError, match="over TLS needs a token"):
        ostraca.connect(first.reached_at, settings=replace(SMALL, tls_ca=str(files.ours.cert)))
    status = ("status", first.reached_at, "--tokens", tokens)
    lacking = command(*status)
    assert (lacking.returncode, "with --tls-ca, or in OSTRACA_TLS_CA" in lacking.stderr) == (2, True)
    doubting = command(*status, "--tls-ca", files.theirs.cert)
    assert (doubting.returncode, "not signed by a CA that is known here" in doubting.stderr) == (1, True)
    asked = command(*status, "--tls-ca", files.ours.cert, "--json")
    assert asked.returncode == 0, asked.stderr
    assert [each["agent"] for each in json.loads(asked.stdout)["agents"]] == [first.name, second.name]
    monkeypatch.setenv("OSTRACA_TLS_CA", str(files.ours.cert))
    monkeypatch.setenv("OSTRACA_TOKEN", tomllib.loads(tokens.read_text())["fabric"][0])
    assert command("metrics", first.reached_at).returncode == 0
    monkeypatch.setenv("OSTRACA_TOKEN", token)
    told = command("explain", hashes(1, 700)[0].hex(), "--volume", "v", "--agent", first.reached_at)
    assert (told.returncode, told.stderr) == (0, "")


def test_who_etcd_may_not_trust_and_whom_we_may_not_is_told_what_to_do(secured: Pod, files: Files) -> None:
    """All at once: each is tried for as long as an etcd that is away."""
    good = files.etcd
    etcd = secured.etcd.endpoints[0]
    expired = files.ours.files("expired", days=-1)
    wrong = {
        "is not signed by a CA in etcd.ca": (replace(good, ca=files.theirs.cert), files.password),
        "etcd accepts no client without a valid certificate": (TlsFiles(good.ca), files.password),
        "the expiry date": (expired, files.password),
        "if etcd requires TLS, set etcd.ca": (None, files.password),
        "check etcd's user and password": (good, files.wrong_password),
    }
    create = (sys.executable, "-m", "ostraca_cli", "fabric", "create", "--etcd", etcd, "--prefix", PREFIX)
    asked = [
        subprocess.Popen(
            [*create, *towards_etcd(*given), "--files", secured.folder / f"refused-{number}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, given in enumerate(wrong.values())
    ]
    rebuilt = command("fabric", "rebuild", *secured.where, *secured.also, "--files", secured.files)
    assert (rebuilt.returncode, "nothing needs a rebuild" in rebuilt.stderr) == (2, True), "it was let in"
    for process, advice in zip(asked, wrong, strict=True):
        _, said = process.communicate(timeout=60)
        assert (process.returncode, advice in said) == (1, True), said
        assert f"etcd at {etcd} did not" in said
        assert "s0mething" not in said
        assert "Traceback" not in said


def test_an_agent_whose_certificate_will_not_do_does_not_start(secured: Pod, files: Files) -> None:
    wrong = {
        "the certificate shown has expired: renew it": files.ours.files("old", HOST, days=-1),
        "the certificate shown is not valid yet: check the clocks of both hosts": files.ours.files_from(
            datetime.now(UTC) + timedelta(hours=1), "early", HOST
        ),
        "does not carry that host": files.ours.files("elsewhere", "10.1.2.3"),
        "is not signed by a CA that is known here": files.theirs.files("foreign", HOST, ca=files.ours.cert),
    }
    refused: list[AgentProcess] = []
    for number, shown in enumerate(wrong.values()):
        refused.append(secured.agent(f"refused-{number}", *with_tls(shown), scheme="tls"))
    try:
        for agent in refused:
            agent.launch()
        for agent, (advice, shown) in zip(refused, wrong.items(), strict=True):
            assert agent.ended() == 2
            said = agent.log.read_text()
            assert f"{shown.cert} will not do for tls://{HOST}" in said
            assert advice in said
    finally:
        for agent in refused:
            secured.agents.remove(agent)


def test_an_agent_waits_for_an_etcd_that_it_cannot_trust_and_says_why(secured: Pod, files: Files) -> None:
    shown = with_tls(files.ours.files("agent-9", HOST))
    doubting = secured.agent("agent-9", *shown, "--etcd-ca", str(files.theirs.cert), scheme="tls")
    try:
        doubting.launch()
        until(
            lambda: "not signed by a CA in etcd.ca: check the file" in doubting.log.read_text(),
            "it says why",
        )
        assert doubting.runs
        doubting.stop()
        doubting.launch("--etcd-ca", str(files.etcd.ca), "--etcd-password", str(files.wrong_password))
        assert doubting.ended() == 1
        assert "check etcd's user and password" in doubting.log.read_text()
    finally:
        secured.agents.remove(doubting)
