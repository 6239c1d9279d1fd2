"""Live settings of all agents."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field

from ostraca_admin.api.context import Admin, IfMatch, Service, Viewer, etag, revision_of
from ostraca_admin.api.forms import NAME, Form
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.overrides import LiveSettings
from ostraca_fabric.ports.records import ABSENT

router = APIRouter(prefix="/v1/settings", tags=["settings"])

SUBJECT = "settings"
_S_MAX = 1e9
_REQUESTS_MAX = 1 << 20
_DEFAULTS = LiveSettings()

LevelText = Literal["debug", "info", "warning", "error"]
Seconds = Annotated[float, Field(gt=0, le=_S_MAX, allow_inf_nan=False)]


class SettingsForm(Form):
    """All live settings; an omitted or null setting is reset."""

    key_ttl_s: Seconds | None = Field(
        None,
        description="Longest time without etcd of serving erasable volumes at an agent, and so until an "
        f"erasure is complete. Unset: {_DEFAULTS.key_ttl_s:g}.",
    )
    log_level: LevelText | None = Field(
        None, description="Lowest level logged by agents. Unset: the level on their command lines."
    )
    requests_max: Annotated[int, Field(ge=1, le=_REQUESTS_MAX)] | None = Field(
        None,
        description="Concurrent requests in one agent; more are declined. Unset: `flow.requests_max` of each "
        "agent.",
    )
    deadline_max_s: Seconds | None = Field(
        None,
        description="Longest deadline; longer deadlines are cut. Unset: `flow.deadline_max_s` of each agent.",
    )
    placement_ttl_s: Seconds | None = Field(
        None,
        description="Longest time for look-ups under an earlier placement epoch. "
        "Unset: `placement_ttl_s` of the agent that ends such epochs.",
    )
    scrub: bool | None = Field(
        None,
        description="False: agents do not scrub flash. Otherwise `owner.scrub.bytes_s` of each agent "
        "applies; 0 is never.",
    )
    direct_reads_tenant: Annotated[str, Field(pattern=NAME)] | None = Field(
        None,
        description="Only tenant of the fabric, whose workers may read drives themselves; no other "
        "tenant can be added then. Unset: workers read through agents.",
    )

    def settings(self) -> LiveSettings:
        """Return the live settings for agents."""
        given = self.model_dump(exclude_none=True)
        longest_s = given.get("key_ttl_s", _DEFAULTS.key_ttl_s)
        return msgspec.convert({**given, "key_ttl_longest_s": longest_s}, LiveSettings)


@router.get("")
async def get_settings(service: Service, _: Viewer, response: Response) -> SettingsForm:
    """Return the live settings of all agents, with an ETag."""
    stored = await service.overrides.get(record_keys.live(), LiveSettings)
    response.headers["ETag"] = etag(ABSENT if stored is None else stored.revision)
    return _shown(_DEFAULTS if stored is None else stored.override)


@router.put("")
async def put_settings(
    service: Service,
    admin: Admin,
    form: SettingsForm,
    response: Response,
    if_match: IfMatch = None,
) -> SettingsForm:
    """Replace all live settings; agents with etcd apply them within a second.

    Repeating the request changes nothing.
    """

    async def checked(before: LiveSettings | None, settings: LiveSettings) -> LiveSettings:
        tenant = settings.direct_reads_tenant
        if tenant and (before is None or before.direct_reads_tenant != tenant):
            await service.tenants.check_only_tenant(tenant)
        return settings.after(before)

    stored, _ = await service.overrides.put(
        record_keys.live(),
        form.settings(),
        admin,
        SUBJECT,
        if_match=revision_of(if_match),
        merge=checked,
        depends_on=[record_keys.overrides_marker()] if form.direct_reads_tenant else [],
    )
    response.headers["ETag"] = etag(stored.revision)
    return _shown(stored.override)


def _shown(live: LiveSettings) -> SettingsForm:
    """Return all settings; null means the value in each agent's own settings."""
    stored = {**msgspec.to_builtins(live), "direct_reads_tenant": live.direct_reads_tenant or None}
    return SettingsForm.model_validate({name: stored[name] for name in SettingsForm.model_fields})
