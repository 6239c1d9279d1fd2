"""What is sent to the service, and what it answers. Fields are named as in records; times are RFC 3339."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ostraca_fabric.admin.model import VERSION, AuditEntry, EnclosureSpec, Kept, Operation
from ostraca_fabric.fabric_map import EnclosureRecord
from ostraca_fabric.inventory import DriveWear, EnclosureReport

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME, examples=["shelf-1"])]
Nguid = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["36344630528001050025384100000001"])]
SHORT_MAX = 256


class Form(BaseModel):
    """What is sent: nothing but what is known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EnclosureForm(Form):
    """An enclosure to register."""

    nqn: str = Field(max_length=223, examples=["nqn.2025-01.io.ostraca:shelf-1"])
    controllers: list[Annotated[str, Field(max_length=SHORT_MAX)]] = Field(
        min_length=1,
        max_length=8,
        description="Paths to it, those to prefer first: rdma://host:4420, tcp://host:4420 or files:///dir.",
        examples=[["rdma://10.0.8.1:4420", "tcp://10.0.9.1:4420"]],
    )
    secret: str = Field(
        "",
        pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$",
        description="The name of the secret that agents show it.",
    )
    failure_domain: str = Field("", pattern=r"^([a-z0-9][a-z0-9._-]{0,62})?$")
    drives: list[Nguid] = Field([], max_length=64, description="Those to use; none: all that it shows.")
    wipe: list[Nguid] = Field(
        [], max_length=64, description="Those that may be formatted though they hold something: IT IS LOST."
    )
    segment_bytes: int = Field(0, ge=0, le=256 << 20, description="0: as follows from a drive's size.")

    def spec(self, name: str) -> EnclosureSpec:
        """Return what is registered."""
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
    """How a change is meant."""

    force: bool = Field(default=False, description="Also where blocks are lost, or look-ups miss some.")


class ReplaceForm(ForceForm):
    """Which drive comes for one."""

    replacement: str = Field(
        "", pattern=r"^([0-9a-f]{32})?$", description="Its NGUID; empty: the only one that is not used."
    )
    wipe: bool = Field(default=False, description="Whether it may be formatted though it holds something.")


class ExpandForm(ForceForm):
    """Which drives are added."""

    drives: list[Nguid] = Field(
        [], max_length=64, description="NGUIDs; none: all that it shows and does not use."
    )
    wipe: list[Nguid] = Field(
        [], max_length=64, description="Those of them that may hold something: IT IS LOST."
    )


class StepView(BaseModel):
    """One step of long work."""

    name: str
    state: str
    message: str
    began: datetime | None
    ended: datetime | None
    detail: dict[str, Any]


class OperationView(BaseModel):
    """Long work."""

    id: str
    kind: str
    enclosure: str = Field(description="What it is about; empty for what is about a tenant.")
    drive: str
    tenant: str
    volume: str = Field(description="Empty: all of the tenant's.")
    state: str
    message: str
    progress: float = Field(ge=0, le=1)
    ends_in_s: float | None = Field(description="An estimate, an upper bound.")
    by: str
    created: datetime | None
    ended: datetime | None
    steps: list[StepView]

    @classmethod
    def of(cls, operation: Operation) -> OperationView:
        """Show it."""
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
    """What a drive's SMART log says."""

    percentage_used: int
    available_spare: int
    media_errors: int
    temperature_c: int
    bytes_written: int
    critical_warning: int

    @classmethod
    def of(cls, wear: DriveWear | None) -> WearView | None:
        """Show it, where there is something."""
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
    """A drive of an enclosure."""

    name: str
    nguid: str
    size_bytes: int
    model: str
    serial: str
    is_in_map: bool
    wear: WearView | None = Field(description="As its own daemon said last; null where none does.")


class SpecView(BaseModel):
    """What was registered."""

    nqn: str
    controllers: list[str]
    secret: str
    failure_domain: str
    drives: list[str]
    wipe: list[str]
    segment_bytes: int


class EnclosureStatusView(BaseModel):
    """What became of it."""

    phase: str
    usable_bytes: int
    drives: list[EnclosureDriveView]
    operation: OperationView
    report: str = Field(description="What its own daemon said last; empty where none runs.")


class EnclosureView(BaseModel):
    """A registered enclosure."""

    name: str
    spec: SpecView
    status: EnclosureStatusView

    @classmethod
    def of(cls, kept: Kept, record: EnclosureRecord | None, report: EnclosureReport | None) -> EnclosureView:
        """Show it, with what the map and its own daemon say."""
        spec, said = kept.spec, {drive.nguid: drive for drive in report.drives} if report else {}
        in_map = {drive.nguid for drive in record.drives} if record else set()
        drives = []
        for drive in kept.status.drives:
            wear = said[drive.nguid].wear if drive.nguid in said else None
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
                phase=kept.status.phase.value,
                usable_bytes=sum(drive.usable_bytes for drive in kept.status.drives if drive.nguid in in_map),
                drives=drives,
                operation=OperationView.of(kept.operation),
                report="" if report is None else report.sentence,
            ),
        )


class AuditView(BaseModel):
    """A change that somebody made."""

    id: str
    at: datetime | None
    who: str
    role: str
    action: str
    subject: str
    detail: str

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditView:
        """Show it."""
        return cls(
            id=entry.id,
            at=when(entry.unix_s),
            who=entry.who,
            role=entry.role,
            action=entry.action,
            subject=entry.subject,
            detail=entry.detail,
        )


class EnclosurePage(BaseModel):
    """Some enclosures, and how to ask for those behind them."""

    items: list[EnclosureView]
    next: str = Field(description="To pass as `after`; empty when these were the last.")


class OperationPage(BaseModel):
    """Some long work, the oldest first."""

    items: list[OperationView]
    next: str


class AuditPage(BaseModel):
    """Some changes, the oldest first."""

    items: list[AuditView]
    next: str


def when(unix_s: float) -> datetime | None:
    """Return a time; None for one that has not come."""
    return datetime.fromtimestamp(unix_s, UTC) if unix_s else None
