"""Requests and answers of the service, with field names as in records.

Times are RFC 3339.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ostraca_admin.model import VERSION, AuditEntry, EnclosureSpec, Operation, Registration
from ostraca_fabric.model.fabric_map import EnclosureRecord
from ostraca_fabric.model.inventory import DriveWear, EnclosureReport

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME, examples=["shelf-1"])]
Nguid = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["36344630528001050025384100000001"])]
SHORT_MAX = 256

_View = TypeVar("_View", bound=BaseModel)


class Form(BaseModel):
    """Request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ListPage(BaseModel, Generic[_View]):
    """Page of a list, with the start of the next page."""

    items: list[_View]
    next: str = Field(description="Value of `after` for the next page; empty on the last page.")

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the schema name: ``AgentPage`` for items of type ``AgentView``."""
        return f"{params[0].__name__.removesuffix('View')}Page"

    @classmethod
    def of(cls, items: list[_View], limit: int, key: Callable[[_View], str]) -> ListPage[_View]:
        """Return the page of *items*; *key* returns an item's value for ``after``."""
        return cls(items=items, next=key(items[-1]) if len(items) == limit else "")


class EnclosureForm(Form):
    """Registration of an enclosure."""

    nqn: str = Field(max_length=223, examples=["nqn.2025-01.io.ostraca:shelf-1"])
    controllers: list[Annotated[str, Field(max_length=SHORT_MAX)]] = Field(
        min_length=1,
        max_length=8,
        description="Paths to the enclosure, preferred first: rdma://host:4420, tcp://host:4420 or "
        "files:///dir.",
        examples=[["rdma://10.0.8.1:4420", "tcp://10.0.9.1:4420"]],
    )
    secret: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$",
        description="Name of the secret for authentication at the enclosure; empty: none.",
    )
    failure_domain: str = Field("", pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$")
    drives: list[Nguid] = Field(
        [], max_length=64, description="NGUIDs of the drives to use; empty list: all visible drives."
    )
    wipe: list[Nguid] = Field(
        [], max_length=64, description="NGUIDs of drives to format even with contents: CONTENTS ARE LOST."
    )
    segment_bytes: int = Field(
        0, ge=0, le=256 << 20, description="Segment size; 0: derived from the drive size."
    )

    def spec(self, name: str) -> EnclosureSpec:
        """Return the registration."""
        return EnclosureSpec(
            VERSION,
            name,
            self.nqn,
            tuple(self.controllers),
            self.secret,
            self.failure_domain,
            tuple(self.drives),
            tuple(self.wipe),
            self.segment_bytes,
        )


class ForceForm(Form):
    """Options of a change."""

    force: bool = Field(
        default=False, description="Proceed even if blocks are lost, or lookups miss some blocks."
    )


class ReplaceForm(ForceForm):
    """Replacement of a drive."""

    replacement: str = Field(
        "", pattern=r"^([0-9a-f]{32})?$", description="NGUID of the new drive; empty: the only unused drive."
    )
    wipe: bool = Field(
        default=False, description="Format the new drive even with contents: CONTENTS ARE LOST."
    )


class ExpandForm(ForceForm):
    """Drives to add."""

    drives: list[Nguid] = Field(
        [], max_length=64, description="NGUIDs of the drives to add; empty list: all visible unused drives."
    )
    wipe: list[Nguid] = Field(
        [], max_length=64, description="NGUIDs of drives to format even with contents: CONTENTS ARE LOST."
    )


class StepView(BaseModel):
    """Step of an operation."""

    name: str
    state: str
    message: str
    began: datetime | None
    ended: datetime | None
    detail: dict[str, Any]


class OperationView(BaseModel):
    """Long operation."""

    id: str
    kind: str
    enclosure: str = Field(description="Subject; empty for operations on a tenant.")
    drive: str
    tenant: str
    volume: str = Field(description="Volume to erase; empty: all volumes of the tenant.")
    state: str
    message: str
    progress: float = Field(ge=0, le=1)
    ends_in_s: float | None = Field(
        description="Estimated upper bound of the remaining time; null if unknown."
    )
    by: str
    created: datetime | None
    ended: datetime | None
    steps: list[StepView]

    @classmethod
    def of(cls, operation: Operation) -> OperationView:
        """Return the view of an operation."""
        return cls(
            id=operation.id,
            kind=operation.kind.value,
            enclosure=operation.enclosure,
            drive=operation.drive,
            tenant=operation.tenant,
            volume=operation.volume,
            state=operation.state.value,
            message=operation.message,
            progress=operation.progress,
            ends_in_s=operation.ends_in_s,
            by=operation.by,
            created=when(operation.created_unix_s),
            ended=when(operation.ended_unix_s),
            steps=[
                StepView(
                    name=step.name,
                    state=step.state.value,
                    message=step.message,
                    began=when(step.began_unix_s),
                    ended=when(step.ended_unix_s),
                    detail=step.detail,
                )
                for step in operation.steps
            ],
        )


class WearView(BaseModel):
    """Values of a drive's SMART log."""

    percentage_used: int
    available_spare: int
    media_errors: int
    temperature_c: int
    bytes_written: int
    critical_warning: int

    @classmethod
    def of(cls, wear: DriveWear | None) -> WearView | None:
        """Return the view of a drive's wear, or None."""
        if wear is None:
            return None
        return cls(
            percentage_used=wear.percentage_used,
            available_spare=wear.available_spare,
            media_errors=wear.media_errors,
            temperature_c=wear.temperature_c,
            bytes_written=wear.bytes_written,
            critical_warning=wear.critical_warning,
        )


class EnclosureDriveView(BaseModel):
    """Drive of an enclosure."""

    name: str
    nguid: str
    size_bytes: int
    model: str
    serial: str
    is_in_map: bool
    wear: WearView | None = Field(description="Latest report of the enclosure daemon; null without a report.")


class SpecView(BaseModel):
    """Registration of an enclosure."""

    nqn: str
    controllers: list[str]
    secret: str
    failure_domain: str
    drives: list[str]
    wipe: list[str]
    segment_bytes: int


class EnclosureStatusView(BaseModel):
    """State of a registered enclosure."""

    phase: str
    usable_bytes: int
    drives: list[EnclosureDriveView]
    operation: OperationView
    report: str = Field(description="Latest decision of the enclosure daemon; empty without a report.")


class EnclosureView(BaseModel):
    """Registered enclosure."""

    name: str
    spec: SpecView
    status: EnclosureStatusView

    @classmethod
    def of(
        cls, registration: Registration, record: EnclosureRecord | None, report: EnclosureReport | None
    ) -> EnclosureView:
        """Return the view of an enclosure, with map record and daemon's report."""
        spec, status = registration.spec, registration.status
        reported = {drive.nguid: drive for drive in report.drives} if report else {}
        in_map = {drive.nguid for drive in record.drives} if record else set()
        drives = []
        for drive in status.drives:
            wear = reported[drive.nguid].wear if drive.nguid in reported else None
            drives.append(
                EnclosureDriveView(
                    name=drive.name,
                    nguid=drive.nguid,
                    size_bytes=drive.size_bytes,
                    model=drive.model,
                    serial=drive.serial,
                    is_in_map=drive.nguid in in_map,
                    wear=WearView.of(wear),
                )
            )
        return cls(
            name=spec.name,
            spec=SpecView(
                nqn=spec.nqn,
                controllers=list(spec.controllers),
                secret=spec.secret,
                failure_domain=spec.failure_domain,
                drives=list(spec.drives),
                wipe=list(spec.wipe),
                segment_bytes=spec.segment_bytes,
            ),
            status=EnclosureStatusView(
                phase=status.phase.value,
                usable_bytes=sum(drive.usable_bytes for drive in status.drives if drive.nguid in in_map),
                drives=drives,
                operation=OperationView.of(registration.operation),
                report="" if report is None else report.sentence,
            ),
        )


class AuditView(BaseModel):
    """Change made by a person or a program."""

    id: str
    at: datetime | None
    who: str
    role: str
    action: str
    subject: str
    detail: str

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditView:
        """Return the view of an audit entry."""
        return cls(
            id=entry.id,
            at=when(entry.unix_s),
            who=entry.who,
            role=entry.role,
            action=entry.action,
            subject=entry.subject,
            detail=entry.detail,
        )


def when(unix_s: float) -> datetime | None:
    """Return a time as datetime; None for 0, the time of an event still to come."""
    return datetime.fromtimestamp(unix_s, UTC) if unix_s else None
