"""The SDK over TLS: whom it believes, what it shows, and what it says when either will not do."""

from __future__ import annotations

import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.sdk.conftest import SETTINGS
from tests.sdk.connection.tls_front import HOST, TlsFront
from tests.sdk.scripted_agent import ScriptedAgent

import ostraca
from ostraca_fabric.sockets.tls import TlsFiles

FAR_S = 30.0
DESCRIPTORS, SELECT_MAX = 2048, 1023


def path_of(agent: ScriptedAgent) -> Path:
    return Path(agent.address.removeprefix("unix://"))


def with_files(files: TlsFiles) -> ostraca.ClientSettings:
    shown = {"tls_cert": str(files.cert), "tls_key": str(files.key)} if files.cert else {}
    return replace(SETTINGS, tls_ca=str(files.ca), **shown)  # type: ignore[arg-type]


def refusal(address: str, files: TlsFiles) -> str:
    with pytest.raises(ostraca.ConnectError) as refused:
        ostraca.connect(address, settings=with_files(files))
    assert address in str(refused.value)
    return str(refused.value)


def test_an_agent_that_is_not_to_be_believed_is_not_spoken_to(
    agent: ScriptedAgent, authority: Authority, agent_files: TlsFiles, tmp_path: Path
) -> None:
    ours = TlsFiles(authority.cert)
    other = TlsFiles(Authority(tmp_path, "other").cert)
    with TlsFront(path_of(agent), agent_files) as front:
        said = refusal(front.address, other)
        assert "not signed by a CA that is known here: check the file of CAs" in said
        assert "does not carry that host" in refusal(front.address.replace(HOST, "localhost"), ours)
    with TlsFront(path_of(agent), authority.files("old", HOST, days=-1)) as front:
        assert "the certificate shown has expired: renew it" in refusal(front.address, ours)
    assert agent.connections.empty()


def test_a_worker_shows_a_certificate_where_it_is_asked_for_one(
    agent: ScriptedAgent, authority: Authority, agent_files: TlsFiles, tmp_path: Path
) -> None:
    with TlsFront(path_of(agent), agent_files, asks_for_certificates=True) as front:
        with ostraca.connect(front.address, settings=with_files(authority.files("worker"))) as client:
            assert client.agent == "agent-1"
        for wrong in (
            TlsFiles(authority.cert),
            authority.files("old-worker", days=-1),
            Authority(tmp_path, "other").files("worker", ca=authority.cert),
        ):
            assert "It may refuse our certificate" in refusal(front.address, wrong)


def test_who_speaks_no_tls_is_found_out(authority: Authority) -> None:
    with socket.create_server((HOST, 0)) as plain:
        address = f"tls://{HOST}:{plain.getsockname()[1]}"
        settings = with_files(TlsFiles(authority.cert))
        with pytest.raises(ostraca.ConnectError, match="no answer to TLS in time"):
            ostraca.connect(address, settings=settings, timeout_s=0.2)
    with TlsFront(Path("/nowhere"), authority.files("front", HOST)) as front:
        plain_address = front.address.replace("tls://", "tcp://")
        with pytest.raises(ostraca.ConnectError, match="closed before an answer to Hello"):
            ostraca.connect(plain_address, credentials="t" * 16, settings=SETTINGS)
        assert "the other end closed the connection" in refusal(front.address, TlsFiles(authority.cert))


def test_the_environment_names_files_that_the_settings_do_not(
    agent: ScriptedAgent, authority: Authority, agent_files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = authority.files("worker-2")
    monkeypatch.setenv("OSTRACA_TLS_CA", str(shown.ca))
    monkeypatch.setenv("OSTRACA_TLS_CERT", str(shown.cert))
    with TlsFront(path_of(agent), agent_files, asks_for_certificates=True) as front:
        with pytest.raises(ostraca.UsageError, match="a certificate and its key go together"):
            ostraca.connect(front.address, settings=SETTINGS)
        monkeypatch.setenv("OSTRACA_TLS_KEY", str(shown.key))
        with ostraca.connect(front.address, settings=SETTINGS) as client:
            assert client.agent == "agent-1"


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ostraca.UsageError, match=r"nothing\.pem"):
        ostraca.connect(f"tls://{HOST}:1", settings=with_files(TlsFiles(tmp_path / "nothing.pem")))


def test_a_process_with_more_than_a_thousand_descriptors_connects(
    agent: ScriptedAgent, agent_files: TlsFiles
) -> None:
    """select() takes no descriptor above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS:
        pytest.skip(f"this process may have no {DESCRIPTORS} descriptors")
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
        with TlsFront(path_of(agent), agent_files) as front:
            while not held or held[-1] < SELECT_MAX:
                held.append(os.open(os.devnull, os.O_RDONLY))
            with ostraca.connect(front.address, settings=with_files(TlsFiles(agent_files.ca))) as client:
                assert client.agent == "agent-1"
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_living_client_believes_the_authority_that_its_file_holds_now(
    agent: ScriptedAgent, authority: Authority, tmp_path: Path
) -> None:
    other, ca = Authority(tmp_path, "other"), tmp_path / "believed.pem"
    ca.write_bytes(authority.cert.read_bytes())
    with TlsFront(path_of(agent), authority.files("before", HOST)) as front:
        port = front.port
        client = ostraca.connect(front.address, settings=with_files(TlsFiles(ca)))
    with client, TlsFront(path_of(agent), other.files("after", HOST), port=port):
        until(client, "not signed by a CA that is known here")
        ca.write_bytes(other.cert.read_bytes()[:-100])
        until(client, "not signed by a CA that is known here")
        ca.write_bytes(other.cert.read_bytes())
        until(client, "")


def until(client: ostraca.Client, words: str) -> None:
    """Ask for the agent's status until that fails with these words; with none, until it is told."""
    until_s = time.monotonic() + FAR_S
    while True:
        problem = ""
        try:
            with client._runtime.connections.borrow_session(time.monotonic() + FAR_S):
                """It is let in."""
        except ostraca.ConnectError as error:
            problem = str(error)
        if words in problem and bool(words) == bool(problem):
            return
        assert time.monotonic() < until_s, problem
