"""What the paths work with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from ostraca_fabric.admin.api.access import Person, Role, Tokens
from ostraca_fabric.admin.audit import Caller
from ostraca_fabric.admin.desk import Desk
from ostraca_fabric.admin.errors import PreconditionError
from ostraca_fabric.admin.hands import BlockHands
from ostraca_fabric.admin.ruling_desk import RulingDesk
from ostraca_fabric.admin.tenant_desk import TenantDesk
from ostraca_fabric.ids import EnclosureId
from ostraca_fabric.inventory import EnclosureReport
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import Records
from ostraca_fabric.volume import VolumeRecord

_bearer = HTTPBearer(auto_error=False, description="A token of the file of tokens.")


@dataclass(frozen=True)
class Context:
    """One admin service."""

    desk: Desk
    rulings: RulingDesk
    tenants: TenantDesk
    records: Records
    membership: Membership
    hands: BlockHands
    tokens: Callable[[], Tokens]
    report_of: Callable[[EnclosureId], Awaitable[EnclosureReport | None]]
    volumes: Callable[[], Awaitable[Sequence[VolumeRecord]]]
    work_was_written: Callable[[], None]
    """Called when long work was written down."""

    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service ends: streams end then."""


def context_of(request: Request) -> Context:
    """Return the service that answers."""
    context: Context = request.app.state.context
    return context


Service = Annotated[Context, Depends(context_of)]


def _who(needed: Role) -> Callable[..., Awaitable[Caller]]:
    async def who(
        request: Request,
        service: Service,
        shown: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> Caller:
        person: Person | None = None if shown is None else service.tokens().whose(shown.credentials)
        if person is None:
            raise HTTPException(
                401,
                "show a token that this service knows: Authorization: Bearer ...",
                {"WWW-Authenticate": "Bearer"},
            )
        if not person.role.may(needed):
            raise HTTPException(403, f"{person.name} is {person.role.value}, and this takes {needed.value}")
        return Caller(person.name, person.role.value, f"{request.method} {request.url.path}")

    who.role = needed  # type: ignore[attr-defined]  # for ``roles``
    return who


Viewer = Annotated[Caller, Depends(_who(Role.VIEWER))]
Operator = Annotated[Caller, Depends(_who(Role.OPERATOR))]
Admin = Annotated[Caller, Depends(_who(Role.ADMIN))]


def revision_of(if_match: str | None) -> int | None:
    """Return what an If-Match header asks for; None where it asks for nothing.

    Raises PreconditionError for one that no ETag of ours can match.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix('"').removesuffix('"')
    if not (text.isascii() and text.isdigit()):
        raise PreconditionError(f"If-Match is no ETag of this service: {text[:64]!a}")
    return int(text)


def etag(revision: int) -> str:
    """Return the ETag of what was written in a revision."""
    return f'"{revision}"'
