"""How a conversation begins: ``Hello``, then ``Welcome`` or ``Refused``. Pure; both ends decide here.

The agent's end chooses the version, the features both know, and one of the arenas offered, and binds the
connection to one tenant. Who may speak for a tenant is said by ``Access``:

- A token, when one is shown, must be one of that tenant's. A wrong token is refused even where none was
  needed.
- Without a token, on a unix socket, the kernel says which user is at the other end. Users may be listed for
  tenants. Beside that, the agent's own user and root may speak for any tenant, unless ``own_user_is_trusted``
  is off: they could read the agent's memory anyway. Turn it off where tenants' containers run as root and
  reach the agent's socket.
- Over TCP there is no way without a token.
- Over TLS, the role ``agent`` takes a certificate that the fabric's CA has signed, and where agents are
  listed one that carries a name of the list; a token is no substitute, and not needed. Workers and operators
  need a token as over TCP, and where ``workers_show_certificates`` such a certificate as well, which says
  nothing of tenants.

A refusal never tells whether the tenant exists, and repeats no more than a few words of the Hello: it goes
into the log, and must fit what a caller reads before the Welcome.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from ostraca_fabric.errors import (
    AuthenticationError,
    ConnectError,
    ProtocolError,
    UsageError,
    VersionError,
    shown,
)
from ostraca_fabric.ids import AgentId, StartId, TenantId, checked_name
from ostraca_fabric.wire.messages import (
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    ArenaOffer,
    ConnectionLimits,
    Hello,
    Refused,
    Welcome,
)

WORKER = "worker"
AGENT = "agent"
OPERATOR = "operator"
ROLES = (WORKER, AGENT, OPERATOR)

CLIENT_BYTES = 16

LEAVING = "leaving"
"""The feature of workers that know another agent, and take ``Leaving`` from one that ends in order."""

ROOT_UID = 0
OVERFLOW_UID = 65534
"""What Linux reports for any user of another user namespace: it identifies nobody."""

_OFFERS_SHOWN = 4

DEFAULT_LIMITS = ConnectionLimits(frame_bytes_max=4 << 20, blocks_max=16384, inflight_max=64)
"""A request of ``blocks_max`` blocks with 32-byte hashes takes about 1.2 MB; an owner's answer to it 0.7."""


@dataclass(frozen=True, slots=True)
class Secured:
    """What TLS says of the other end."""

    names: frozenset[str] | None
    """Those in its certificate, which the fabric's CA has signed; None where it showed none."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may speak for whom.

    ``own_uid`` is the agent's own user. ``tenant_tokens`` and ``tenant_uids`` say for each tenant which
    tokens and which users of this machine speak for it. ``fabric_tokens`` are for the roles ``agent`` and
    ``operator``, which have no tenant.
    """

    own_uid: int
    tenant_tokens: Mapping[TenantId, tuple[str, ...]] = field(default_factory=dict)
    tenant_uids: Mapping[TenantId, frozenset[int]] = field(default_factory=dict)
    fabric_tokens: tuple[str, ...] = ()
    own_user_is_trusted: bool = True
    agent_names: frozenset[str] | None = None
    """An agent's certificate carries one of these; None: any that the fabric's CA has signed will do."""

    workers_show_certificates: bool = False

    def allows(self, hello: Hello, peer_uid: int | None, secured: Secured | None = None) -> bool:
        """Tell whether whoever said this may have the role and the tenant.

        *peer_uid* is None over TCP, *secured* without TLS.
        """
        if secured is not None and not self.shows_enough(hello.role, secured):
            return False
        tenant = TenantId(hello.tenant)
        if hello.token:
            good = self.tenant_tokens.get(tenant, ()) if hello.role == WORKER else self.fabric_tokens
            # Every token is compared, each in constant time: the time taken says nothing about any of them.
            return any([hmac.compare_digest(hello.token.encode(), token.encode()) for token in good])  # noqa: C419
        if secured is not None and hello.role == AGENT:
            return True
        if peer_uid is None or peer_uid == OVERFLOW_UID:
            return False
        if self.own_user_is_trusted and peer_uid in (self.own_uid, ROOT_UID):
            return True
        return hello.role == WORKER and peer_uid in self.tenant_uids.get(tenant, frozenset())

    def shows_enough(self, role: str, secured: Secured) -> bool:
        """Tell whether the certificate shown, if any, suffices for this role."""
        if secured.names is None:
            return role != AGENT and not self.workers_show_certificates
        return role != AGENT or self.agent_names is None or bool(secured.names & self.agent_names)


class _RefusalError(Exception):
    """Carries a refusal up to ``AgentHandshake.answer``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(code, message)


@dataclass(frozen=True, slots=True)
class AgentHandshake:
    """The agent's end: what it is, what it can do and whom it lets in. Holds for all its connections."""

    agent: AgentId
    start_id: StartId
    access: Access
    limits: ConnectionLimits = DEFAULT_LIMITS
    features: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    """Names of the transports this agent can attach an arena by."""

    version_oldest: int = WIRE_VERSION_OLDEST
    version_newest: int = WIRE_VERSION

    def answer(self, hello: Hello, peer_uid: int | None, secured: Secured | None = None) -> Welcome | Refused:
        """Answer a Hello. After a Refused the connection is to be closed.

        *peer_uid* is the user at the other end as the kernel gives it, None where it does not (TCP);
        *secured* is what TLS says of it, None where there is none.
        """
        try:
            version = self._version(hello)
            self._check_identity(hello, peer_uid, secured)
            transport = self._transport(hello.arenas)
        except _RefusalError as refusal:
            return refusal.refused
        features = tuple(name for name in self.features if name in hello.features)
        return Welcome(version, self.agent, self.start_id, features, self.limits, transport)

    def _version(self, hello: Hello) -> int:
        common = min(self.version_newest, hello.version_newest)
        if common >= max(self.version_oldest, hello.version_oldest):
            return common
        caller = hello.role if hello.role in ROLES else "caller"
        older = "the agent" if hello.version_oldest > self.version_newest else f"the {caller}"
        raise _RefusalError(
            "version",
            f"agent {self.agent} speaks wire versions {self.version_oldest} to {self.version_newest}, "
            f"the other end {hello.version_oldest} to {hello.version_newest}: upgrade {older}",
        )

    def _check_identity(self, hello: Hello, peer_uid: int | None, secured: Secured | None) -> None:
        if hello.role not in ROLES:
            raise _RefusalError("protocol", f"{shown(hello.role)} is no role: say one of {', '.join(ROLES)}")
        if hello.role == WORKER:
            try:
                checked_name("tenant", hello.tenant)
            except UsageError as error:
                raise _RefusalError("protocol", str(error)) from error
            if len(hello.client) not in (0, CLIENT_BYTES):
                raise _RefusalError("protocol", f"client has {len(hello.client)} bytes: say {CLIENT_BYTES}")
        elif hello.tenant or hello.arenas:
            raise _RefusalError("protocol", f"an {hello.role} has no tenant and no arena: leave both empty")
        if self.access.allows(hello, peer_uid, secured):
            return
        who = f"tenant {hello.tenant}" if hello.role == WORKER else f"the role {hello.role}"
        if secured is not None and not self.access.shows_enough(hello.role, secured):
            what = "carries none of the names listed for agents"
            if secured.names is None:
                what = "is missing: show one that the fabric's CA has signed"
            raise _RefusalError("authentication", f"the certificate for {who} over TLS {what}")
        if hello.token:
            raise _RefusalError(
                "authentication", f"this token does not speak for {who}: check token and name"
            )
        seen = "over TCP" if peer_uid is None else f"as user {peer_uid}"
        seen = seen if secured is None else "over TLS"
        raise _RefusalError("authentication", f"nobody speaks for {who} {seen} without a token: give one")

    def _transport(self, offers: tuple[ArenaOffer, ...]) -> str:
        if not offers:
            return ""
        for offer in offers:
            if offer.transport in self.transports:
                return offer.transport
        offered = ", ".join(shown(offer.transport) for offer in offers[:_OFFERS_SHOWN])
        raise _RefusalError(
            "transport",
            f"agent {self.agent} moves blocks by {', '.join(self.transports) or 'nothing'}, "
            f"and the arena was offered by {offered}: offer another transport",
        )


@dataclass(frozen=True, slots=True)
class WorkerHandshake:
    """The end that connects, whatever its role: it sends ``hello`` and gives the answer to ``accept``."""

    role: str
    tenant: str
    name: str
    token: str = ""
    features: tuple[str, ...] = ()
    arenas: tuple[ArenaOffer, ...] = ()
    client: bytes = b""
    version_oldest: int = WIRE_VERSION_OLDEST
    version_newest: int = WIRE_VERSION

    @property
    def hello(self) -> Hello:
        """The first frame to send."""
        return Hello(
            version_oldest=self.version_oldest,
            version_newest=self.version_newest,
            role=self.role,
            tenant=self.tenant,
            token=self.token,
            name=self.name,
            features=self.features,
            arenas=self.arenas,
            client=self.client,
        )

    def accept(self, answer: Welcome | Refused) -> Welcome:
        """Return the Welcome when this end can go on with it.

        Raises AuthenticationError, VersionError or ConnectError as the agent refused, with its words, and
        ProtocolError when the agent chose something that was not offered.
        """
        return accepted(self.hello, answer)


def accepted(hello: Hello, answer: Welcome | Refused) -> Welcome:
    """Return the Welcome to *hello*; raises as ``WorkerHandshake.accept`` does."""
    if isinstance(answer, Refused):
        error = {"authentication": AuthenticationError, "version": VersionError}.get(
            answer.code, ConnectError
        )
        raise error(f"the agent refused the connection ({answer.code}): {answer.message}")
    limits = answer.limits
    wrong = [
        (not hello.version_oldest <= answer.version <= hello.version_newest, f"version {answer.version}"),
        (not set(answer.features) <= set(hello.features), f"features {answer.features}"),
        (answer.transport not in _transports(hello), f"transport {answer.transport!r}"),
        (min(limits.frame_bytes_max, limits.blocks_max, limits.inflight_max) < 1, f"limits {limits}"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise ProtocolError(
                f"agent {answer.agent} chose {what}, which was not offered: is it an Ostraca agent?"
            )
    return answer


def _transports(hello: Hello) -> tuple[str, ...]:
    return tuple(offer.transport for offer in hello.arenas) or ("",)
