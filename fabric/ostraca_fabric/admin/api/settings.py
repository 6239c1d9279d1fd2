"""Settings of all agents that change while they run."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, Field

from ostraca_fabric import record_keys
from ostraca_fabric.admin.api.context import Admin, Service, Viewer, etag, revision_of
from ostraca_fabric.admin.api.forms import Form
from ostraca_fabric.ports.records import ABSENT
from ostraca_fabric.rulings import LiveSettings, LogLevel

router = APIRouter(prefix="/v1/settings", tags=["settings"])

SUBJECT = "settings"
_S_MAX = 1e9
_REQUESTS_MAX = 1 << 20
_DEFAULTS = LiveSettings()

LevelText = Literal["debug", "info", "warning", "error"]
Seconds = Annotated[float, Field(gt=0, le=_S_MAX, allow_inf_nan=False)]


class SettingsForm(Form):
    """All of them; what is left out, or null, is taken back."""

    key_ttl_s: Seconds | None = Field(
        None,
        description="How long an agent that can't ask etcd goes on serving erasable volumes: an erasure is "
        f"complete after so long at the latest. Taken back, it is {_DEFAULTS.key_ttl_s:g}.",
    )
    log_level: LevelText | None = Field(
        None, description="The least that agents log. Taken back, it is that of their command lines."
    )
    requests_max: Annotated[int, Field(ge=1, le=_REQUESTS_MAX)] | None = Field(
        None,
        description="Requests under way in one agent; more are declined. Taken back, it is "
        "`flow.requests_max` of each agent's own settings.",
    )
    deadline_max_s: Seconds | None = Field(
        None,
        description="The longest deadline that agents take at its word. Taken back, it is "
        "`flow.deadline_max_s` of each agent's own.",
    )
    placement_ttl_s: Seconds | None = Field(
        None,
        description="How long blocks are looked up where an earlier placement epoch placed them, at most. "
        "Taken back, it is `placement_ttl_s` of the agent that ends such epochs.",
    )
    scrub: bool | None = Field(
        None,
        description="False: agents do not read flash again to find what has rotted. Otherwise they do as "
        "`owner.scrub.bytes_s` of each says, where 0 is never.",
    )

    def settings(self) -> LiveSettings:
        """Return what agents are told."""
        key_ttl_s = _DEFAULTS.key_ttl_s if self.key_ttl_s is None else self.key_ttl_s
        return LiveSettings(
            key_ttl_s=key_ttl_s,
            key_ttl_longest_s=key_ttl_s,
            log_level=None if self.log_level is None else LogLevel(self.log_level),
            requests_max=self.requests_max,
            deadline_max_s=self.deadline_max_s,
            placement_ttl_s=self.placement_ttl_s,
            scrub=self.scrub,
        )


class SettingsView(BaseModel):
    """All of them; null: as each agent's own settings say."""

    key_ttl_s: float
    log_level: LevelText | None
    requests_max: int | None
    deadline_max_s: float | None
    placement_ttl_s: float | None
    scrub: bool | None

    @classmethod
    def of(cls, live: LiveSettings) -> SettingsView:
        """Show them."""
        return cls(
            key_ttl_s=live.key_ttl_s,
            log_level=None if live.log_level is None else live.log_level.value,
            requests_max=live.requests_max,
            deadline_max_s=live.deadline_max_s,
            placement_ttl_s=live.placement_ttl_s,
            scrub=live.scrub,
        )


@router.get("")
async def get_settings(service: Service, _: Viewer, response: Response) -> SettingsView:
    """Return the settings of all agents that change while they run, with their ETag."""
    ruled = await service.rulings.ruled(record_keys.live(), LiveSettings)
    response.headers["ETag"] = etag(ABSENT if ruled is None else ruled.revision)
    return SettingsView.of(_DEFAULTS if ruled is None else ruled.ruling)


@router.put("")
async def put_settings(
    service: Service,
    admin: Admin,
    form: SettingsForm,
    response: Response,
    if_match: Annotated[str | None, Header(description="An ETag: refuse if they were changed since.")] = None,
) -> SettingsView:
    """Set all of them at once; agents that hear of etcd go by them within a second.

    The same again changes nothing.
    """
    ruled, _ = await service.rulings.rule(
        record_keys.live(),
        form.settings(),
        admin,
        SUBJECT,
        if_match=revision_of(if_match),
        after=lambda before, settings: settings.after(before),
    )
    response.headers["ETag"] = etag(ruled.revision)
    return SettingsView.of(ruled.ruling)
