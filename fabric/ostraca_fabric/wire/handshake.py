"""Handshake of a connection: ``Hello``, then ``Welcome`` or ``Refused``. Pure, for both ends.

The agent chooses the version, the common features and one of the offered arenas, and binds the connection to
one tenant. ``Access`` decides on the right to speak for a tenant:

- A token, if shown, must be one of the tenant's. A wrong token is refused even where no token is needed.
- Without a token on a unix socket, the kernel names the user at the other end. Users may be listed for
  tenants. The agent's own user and root may also speak for any tenant, since both could read the agent's
  memory anyway. Turn ``own_user_is_trusted`` off if tenants' containers run as root and reach the agent's
  socket.
- Over TCP, a token is always required.
- Over TLS, the role ``agent`` requires a certificate signed by the fabric's CA, with a listed name if agents
  are listed. A token is neither needed nor a substitute. Workers and operators need a token as over TCP. With
  ``workers_show_certificates``, workers and operators need a certificate as well, without any meaning for
  tenants.

A refusal never reveals whether the tenant exists, and repeats only a few words of the Hello: the refusal is
logged, and must fit the caller's limit before the Welcome.
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
from ostraca_fabric.model.ids import AgentId, StartId, TenantId, checked_name
from ostraca_fabric.wire.messages import (
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    AgentMemory,
    ArenaOffer,
    ConnectionLimits,
    Hello,
    Refused,
    Welcome,
    WorkerMemory,
)

WORKER = "worker"
AGENT = "agent"
OPERATOR = "operator"
ROLES = (WORKER, AGENT, OPERATOR)

CLIENT_BYTES = 16

LEAVING = "leaving"
"""Feature of workers with a second agent: ``Leaving`` from an agent in graceful shutdown is understood."""

PLACING = "placing"
"""Feature of agents that answer ``PlacementQuery``, and ``PrefetchFor`` of operators."""

DIRECT = "direct"
"""Feature of workers that read drives themselves, and of agents that let them."""

MEMORY = "memory"
"""Feature of workers that read the agent's memory, and of agents that say where blocks lie there."""

REGIONS = "regions"
"""Feature of workers whose requests may name addresses in offered regions, and of agents that reach these."""

ROOT_UID = 0
OVERFLOW_UID = 65534
"""Linux reports this id for any user of another user namespace, so no user is identified."""

_OFFERS_SHOWN = 4

DEFAULT_LIMITS = ConnectionLimits(frame_bytes_max=4 << 20, blocks_max=16384, inflight_max=64)
"""A request of ``blocks_max`` blocks with 32-byte hashes takes about 1.2 MB, a shard owner's answer 0.7
MB."""


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """Identity of the other end according to TLS."""

    names: frozenset[str] | None
    """Names in the certificate, signed by the fabric's CA; None without a certificate."""


@dataclass(frozen=True, slots=True)
class Access:
    """Rights to speak for tenants and roles.

    ``own_uid`` is the agent's own user. ``tenant_tokens`` and ``tenant_uids`` list, for each tenant, the
    tokens and the users of this machine with the right to speak for the tenant. ``fabric_tokens`` are for the
    roles ``agent`` and ``operator``, which have no tenant.
    """

    own_uid: int
    tenant_tokens: Mapping[TenantId, tuple[str, ...]] = field(default_factory=dict)
    tenant_uids: Mapping[TenantId, frozenset[int]] = field(default_factory=dict)
    fabric_tokens: tuple[str, ...] = ()
    own_user_is_trusted: bool = True
    agent_names: frozenset[str] | None = None
    """An agent's certificate must carry a name listed here; None means any name signed by the fabric's CA."""

    workers_show_certificates: bool = False

    def allows(self, hello: Hello, peer_uid: int | None, secured: PeerCertificate | None = None) -> bool:
        """Return whether the sender of a Hello may have the role and the tenant.

        *peer_uid* is None over TCP, *secured* is None without TLS.
        """
        if secured is not None and not self.shows_enough(hello.role, secured):
            return False
        tenant = TenantId(hello.tenant)
        if hello.token:
            good = self.tenant_tokens.get(tenant, ()) if hello.role == WORKER else self.fabric_tokens
            # All tokens are compared, each in constant time, so that the duration reveals no token.
            return any([hmac.compare_digest(hello.token.encode(), token.encode()) for token in good])  # noqa: C419
        if secured is not None and hello.role == AGENT:
            return True
        if peer_uid is None or peer_uid == OVERFLOW_UID:
            return False
        return self.trusts(peer_uid) or (
            hello.role == WORKER and peer_uid in self.tenant_uids.get(tenant, frozenset())
        )

    def trusts(self, peer_uid: int | None) -> bool:
        """Return whether a user can read the agent's memory anyway: the agent's own user, and root."""
        return self.own_user_is_trusted and peer_uid in (self.own_uid, ROOT_UID)

    def shows_enough(self, role: str, secured: PeerCertificate) -> bool:
        """Return whether the certificate, or its absence, suffices for this role."""
        if secured.names is None:
            return role != AGENT and not self.workers_show_certificates
        return role != AGENT or self.agent_names is None or bool(secured.names & self.agent_names)


class _RefusalError(Exception):
    """Refusal on the way to ``AgentHandshake.answer``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(code, message)


@dataclass(frozen=True, slots=True)
class AgentHandshake:
    """Agent's end of the handshake, for all connections of the agent."""

    agent: AgentId
    start_id: StartId
    access: Access
    limits: ConnectionLimits = DEFAULT_LIMITS
    features: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    """Names of the transports usable for attaching an arena."""

    memory: AgentMemory | None = None
    """Told to workers with the feature ``memory``, of users that can read the agent's memory anyway. None for
    agents that neither show their memory nor read that of workers."""

    version_oldest: int = WIRE_VERSION_OLDEST
    version_newest: int = WIRE_VERSION

    def answer(
        self, hello: Hello, peer_uid: int | None, secured: PeerCertificate | None = None
    ) -> Welcome | Refused:
        """Return the answer to a Hello. Close the connection after a Refused.

        *peer_uid* is the user at the other end according to the kernel, None over TCP. *secured* is the
        identity according to TLS, None without TLS. ``reads_worker`` is still to be tried.
        """
        try:
            version = self._version(hello)
            self._check_identity(hello, peer_uid, secured)
            transport = self._transport(hello.arenas)
        except _RefusalError as refusal:
            return refusal.refused
        features = tuple(name for name in self.features if name in hello.features)
        may_read = self.memory is not None and hello.role == WORKER and self.access.trusts(peer_uid)
        memory = self.memory if may_read and MEMORY in features else None
        reads_worker = may_read and hello.memory is not None
        return Welcome(
            version, self.agent, self.start_id, features, self.limits, transport, memory, reads_worker
        )

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

    def _check_identity(self, hello: Hello, peer_uid: int | None, secured: PeerCertificate | None) -> None:
        if hello.role not in ROLES:
            raise _RefusalError("protocol", f"{shown(hello.role)} is no role: use {', '.join(ROLES)}")
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
                what = "is missing: use a certificate signed by the fabric's CA"
            raise _RefusalError("authentication", f"the certificate for {who} over TLS {what}")
        if hello.token:
            raise _RefusalError(
                "authentication", f"the token is not valid for {who}: check the token and the name"
            )
        seen = "over TCP" if peer_uid is None else f"as user {peer_uid}"
        seen = seen if secured is None else "over TLS"
        raise _RefusalError("authentication", f"{who} {seen} needs a token: give a token")

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


def hello_for(
    role: str,
    tenant: str,
    name: str,
    token: str = "",
    features: tuple[str, ...] = (),
    *,
    arenas: tuple[ArenaOffer, ...] = (),
    client: bytes = b"",
    memory: WorkerMemory | None = None,
) -> Hello:
    """Return the first frame of a connecting end; pass the answer to ``accepted``."""
    return Hello(
        WIRE_VERSION_OLDEST, WIRE_VERSION, role, tenant, token, name, features, arenas, client, memory
    )


def accepted(hello: Hello, answer: Welcome | Refused) -> Welcome:
    """Return the Welcome to *hello* if acceptable to this end.

    Raises AuthenticationError, VersionError or ConnectError with the words of the agent's refusal. Raises
    ProtocolError if the agent's choice was not offered.
    """
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
        (answer.memory is not None and MEMORY not in hello.features, "reads of its memory"),
        (answer.reads_worker and hello.memory is None, "reads of this worker's memory"),
        (min(limits.frame_bytes_max, limits.blocks_max, limits.inflight_max) < 1, f"limits {limits}"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise ProtocolError(
                f"agent {answer.agent} chose {what} without an offer: check that an Ostraca agent listens "
                "there"
            )
    return answer


def _transports(hello: Hello) -> tuple[str, ...]:
    return tuple(offer.transport for offer in hello.arenas) or ("",)
