"""Tokens and certificates that are replaced while agents run. Real processes.

One agent looks at its file of tokens again and again; the other one does so when it is told to.
"""

from __future__ import annotations

import signal
import ssl
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.contract.network.certificates import Authority
from tests.contract.network.sockets import cut_internet
from tests.fabric.membership.nodes import Cluster
from tests.support.pod.processes import AgentProcess, Pod, await_hits, until
from tests.support.pod.secured import HOST, secret, with_tls
from tests.support.pod.work import await_puts, missing, put_all

import ostraca
from ostraca import Reason
from ostraca_fabric.sockets.tls import TlsFiles

pytestmark = pytest.mark.slow

LOOKS = ("0.1", "3600")
"""How often each agent looks at its file of tokens, in seconds."""


@dataclass(frozen=True)
class Renewed:
    """A fabric over TLS, and what can be replaced in it."""

    pod: Pod
    authority: Authority
    ca: Path
    """The CAs that all its agents believe."""

    tokens: Path

    @property
    def agents(self) -> list[AgentProcess]:
        return self.pod.agents

    @property
    def worker_token(self) -> str:
        token: str = tomllib.loads(self.tokens.read_text())["tokens"]["default"][0]
        return token

    def take_tokens(self, *, workers: str, agents: str) -> None:
        replace(self.tokens, f'fabric = ["{agents}"]\n[tokens]\ndefault = ["{workers}"]\n')

    def files(self, agent: str) -> TlsFiles:
        return TlsFiles(self.ca, self.pod.folder / f"{agent}.pem", self.pod.folder / f"{agent}.key")

    def show(self, agent: str, made: TlsFiles) -> None:
        """Have an agent show this certificate."""
        shown = self.files(agent)
        for path, source in ((shown.key, made.key), (shown.cert, made.cert)):
            assert path is not None
            assert source is not None
            replace(path, source.read_text())

    def lets_in(self, agent: AgentProcess, token: str, *, ca: Path | None = None) -> bool:
        """Say whether a worker elsewhere is let in by a token."""
        try:
            agent.connect_from_elsewhere(token, ca or self.ca).close()
        except ostraca.AuthenticationError:
            return False
        return True

    def await_let_in(self, agent: AgentProcess, token: str) -> None:
        until(lambda: self.lets_in(agent, token), f"{agent.name} has read its tokens again")


def replace(path: Path, content: str) -> None:
    """Put another file in its place, at once."""
    secret(path.with_suffix(".next"), content).rename(path)


def certificate(agent: AgentProcess) -> bytes:
    """Return what it shows to who connects."""
    port = int(agent.reached_at.rpartition(":")[2])
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((HOST, port)))


def await_word(agent: AgentProcess, words: str, began: int) -> None:
    """Wait until its log says so, after so many characters."""
    until(lambda: words in agent.log.read_text()[began:], f"{agent.name} says: {words}")


def refused_by(agent: AgentProcess) -> set[str]:
    look = agent.status()
    assert look is not None
    return {peer.agent for peer in look.peers if peer.is_refused}


@pytest.fixture(scope="module")
def begun(etcd: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renewed]:
    folder = tmp_path_factory.mktemp("renewed")
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with Pod(folder, etcd, prefix="/ostraca/renewed/") as pod:
        pod.create(drives=1)
        renewed = Renewed(pod, authority, folder / "ca.pem", pod.files / "tokens.toml")
        for number, look_s in enumerate(LOOKS):
            name = f"agent-{number}"
            shown = with_tls(renewed.files(name))
            pod.agent(name, *shown, "--set", f"secrets_check_s={look_s}", scheme="tls")
        yield renewed


@pytest.fixture
def renewed(begun: Renewed) -> Iterator[Renewed]:
    """Start the agents, with the initial tokens and certificates."""
    replace(begun.ca, begun.authority.cert.read_text())
    for agent in begun.agents:
        begun.show(agent.name, begun.authority.files(agent.name, HOST))
    begun.take_tokens(workers="first-worker-token", agents="first-fabric-token")
    begun.pod.start()
    begun.agents[1].signal(signal.SIGHUP)
    for agent in begun.agents:
        begun.await_let_in(agent, "first-worker-token")
    with begun.agents[0].connect() as client:
        await_puts(client)
        put_all(client)
    yield begun
    begun.pod.check_logs()


def test_a_token_that_is_replaced_lets_in_no_more_and_puts_out_who_came_in_by_it(renewed: Renewed) -> None:
    looking, told = renewed.agents
    old, new = renewed.worker_token, "second-worker-token"
    with looking.connect_from_elsewhere(old, renewed.ca) as was_in, looking.connect() as local:
        assert missing(was_in) == missing(local) == []
        renewed.take_tokens(workers=new, agents="first-fabric-token")
        renewed.await_let_in(looking, new)
        assert not renewed.lets_in(looking, old)
        with pytest.raises(ostraca.AuthenticationError, match="the token is not valid for tenant default"):
            missing(was_in)
        assert missing(local) == [], "nobody else is put out, nor are agents"
    assert "credentials revoked" in looking.log.read_text()
    assert renewed.lets_in(told, old), "it has not looked"
    told.signal(signal.SIGHUP)
    renewed.await_let_in(told, new)
    assert not renewed.lets_in(told, old)


def test_a_new_fabric_token_is_what_agents_show_each_other_from_then_on(renewed: Renewed) -> None:
    looking, told = renewed.agents
    with looking.connect() as here, told.connect() as there:
        assert missing(here) == missing(there) == []
        renewed.take_tokens(workers=renewed.worker_token, agents="second-fabric-token")
        reasons: Counter[Reason | None] = Counter()
        until(lambda: bool(missing(there, reasons=reasons)), "the other one shows what is refused now")
        assert set(reasons) <= {Reason.NONE, Reason.NO_OWNER}
        until(lambda: refused_by(told) == {looking.name}, "it says so")
        told.signal(signal.SIGHUP)
        for client in (here, there):
            await_hits(client)
        assert refused_by(looking) == refused_by(told) == set()


def test_a_file_of_tokens_that_will_not_do_leaves_all_as_it_was_and_is_told(renewed: Renewed) -> None:
    _, told = renewed.agents
    token = renewed.worker_token
    for wrong, why in (
        ("[tokens]\ndefault = no-token", "is no TOML"),
        (
            '[token]\ndefault = ["second-worker-token"]',
            "is no file of tokens: allowed names are fabric, tokens",
        ),
        ('[tokens]\ndefault = ["short-1"]', "is no file of tokens"),
    ):
        began = [len(agent.log.read_text()) for agent in renewed.agents]
        replace(renewed.tokens, wrong)
        told.signal(signal.SIGHUP)
        for agent, said in zip(renewed.agents, began, strict=True):
            await_word(agent, f"the previous content stays in use: {renewed.tokens} {why}", said)
            assert renewed.lets_in(agent, token)
    for agent in renewed.agents:
        assert "short-1" not in agent.log.read_text()


def test_certificates_and_their_authority_are_replaced_while_agents_run(
    renewed: Renewed, tmp_path: Path
) -> None:
    token, first, second = renewed.worker_token, renewed.authority, Authority(tmp_path, "second")
    looking, told = renewed.agents
    before = certificate(looking)
    with (
        looking.connect_from_elsewhere(token, first.cert) as was_in,
        looking.connect() as here,
        told.connect() as there,
    ):
        assert missing(was_in) == missing(here) == missing(there) == []
        replace(renewed.ca, first.cert.read_text() + second.cert.read_text())
        for agent in renewed.agents:
            made = second.files(agent.name, HOST)
            renewed.show(agent.name, made)
            assert made.cert is not None
            assert certificate(agent) == ssl.PEM_cert_to_DER_cert(made.cert.read_text())
        assert certificate(looking) != before
        assert missing(was_in) == [], "what exists goes on with what it was made with"
        replace(renewed.ca, second.cert.read_text())
        for agent in renewed.agents:
            assert agent.process is not None
            assert cut_internet(agent.process.pid)
        for client in (here, there):
            await_hits(client)
    assert renewed.lets_in(looking, token, ca=second.cert)
    with pytest.raises(ostraca.ConnectError, match="is not signed by a CA that is known here"):
        renewed.lets_in(looking, token, ca=first.cert)
    renewed.show(looking.name, second.files(looking.name, HOST, days=-1))
    assert renewed.lets_in(looking, token, ca=second.cert), "it shows what it had before"
    until(lambda: "Continuing with the previous content of" in looking.log.read_text(), "the agent says so")
