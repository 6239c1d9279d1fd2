"""Context of the routes: services, caller, ETags and common parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from ostraca_admin.agent_queries import BlockAgentClient
from ostraca_admin.api.access import Principal, Role, Tokens
from ostraca_admin.audit import Requester
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.errors import PreconditionError
from ostraca_admin.override_service import OverrideService
from ostraca_admin.tenant_service import TenantService
from ostraca_fabric.model.ids import EnclosureId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import Records

_bearer = HTTPBearer(auto_error=False, description="Token from the file of people.")


@dataclass(frozen=True)
class Context:
    """Dependencies of an admin service."""

    enclosures: EnclosureService
    overrides: OverrideService
    tenants: TenantService
    records: Records
    membership: Membership
    agents: BlockAgentClient
    tokens: Callable[[], Tokens]
    report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]]
    volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]]
    notify_runner: Callable[[], None]
    """Called after an operation was recorded."""

    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the end of the service, to end streams."""


def context_of(request: Request) -> Context:
    """Return the service for a request."""
    context: Context = request.app.state.context
    return context


Service = Annotated[Context, Depends(context_of)]


def owner_of(service: Context, credentials: HTTPAuthorizationCredentials | None) -> Principal | None:
    """Return the owner of a request's token by the present file of people, or None."""
    return None if credentials is None else service.tokens().owner(credentials.credentials)


Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def _authorize(needed: Role) -> Callable[..., Awaitable[Requester]]:
    async def authorize(request: Request, service: Service, credentials: Credentials) -> Requester:
        person = owner_of(service, credentials)
        if person is None:
            raise HTTPException(
                401,
                "missing or unknown token: send a token of the file of people, as Authorization: Bearer ...",
                {"WWW-Authenticate": "Bearer"},
            )
        if not person.role.may(needed):
            raise HTTPException(
                403, f"{person.name} has the role {person.role.value}, and this needs {needed.value}"
            )
        return Requester(person.name, person.role.value, f"{request.method} {request.url.path}")

    authorize.role = needed  # type: ignore[attr-defined]  # for ``roles``
    return authorize


Viewer = Annotated[Requester, Depends(_authorize(Role.VIEWER))]
Operator = Annotated[Requester, Depends(_authorize(Role.OPERATOR))]
Admin = Annotated[Requester, Depends(_authorize(Role.ADMIN))]

After = Annotated[str, Query(max_length=256, description="Return only items after this name or id.")]
Limit = Annotated[int, Query(ge=1, le=500)]
LongLimit = Annotated[int, Query(ge=1, le=2000)]
IfMatch = Annotated[str | None, Header(description="ETag of an earlier read: refuse after a change.")]
_REVISION_DIGITS_MAX = 20


def revision_of(if_match: str | None) -> int | None:
    """Return the revision in an If-Match header; None without a condition.

    Raises PreconditionError for a header no ETag can match.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix('"').removesuffix('"')
    if not (text.isascii() and text.isdigit() and len(text) <= _REVISION_DIGITS_MAX):
        raise PreconditionError(f"If-Match has no ETag of this service: {text[:64]!a}")
    return int(text)


def etag(revision: int) -> str:
    """Return the ETag of a record's revision."""
    return f'"{revision}"'
