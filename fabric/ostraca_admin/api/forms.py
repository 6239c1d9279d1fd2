"""Requests of the service, and pages of lists, with field names as in records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ostraca_admin.api.views import ApiView
from ostraca_admin.model import VERSION, EnclosureSpec
from ostraca_fabric.model.target import NQN_PREFIX

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME, examples=["shelf-1"])]
Nguid = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["36344630528001050025384100000001"])]
SHORT_MAX = 256

_View = TypeVar("_View", bound=ApiView)


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

    nqn: str = Field(
        "",
        max_length=223,
        description="NQN of the subsystem; empty: derived from the name.",
        examples=["nqn.2025-01.io.ostraca:shelf-1"],
    )
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
            self.nqn or f"{NQN_PREFIX}{name}",
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
