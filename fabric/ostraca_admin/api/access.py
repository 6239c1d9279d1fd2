"""Access control by bearer tokens, each of a person or program with a role. Pure.

The file of tokens is TOML, reloaded after changes::

    [admin]                 # everything
    alice = ["..."]

    [operator]              # drain, expand, replace and the like of registered enclosures
    pager = ["..."]

    [viewer]                # read
    grafana = ["..."]
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

from ostraca_fabric.errors import UsageError

TOKEN_CHARACTERS_MIN = 16
_Token = Annotated[str, msgspec.Meta(pattern=f"^[!-~]{{{TOKEN_CHARACTERS_MIN},}}$")]


class Role(Enum):
    """Role of a caller; each role includes the rights of all before."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def may(self, needed: Role) -> bool:
        """Return whether this role includes *needed*."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Principal:
    """Caller with a role."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Tokens:
    """All known tokens."""

    known: tuple[tuple[str, Principal], ...]

    def owner(self, token: str) -> Principal | None:
        """Return the owner of a token, or None. Compares all tokens in constant time."""
        found = None
        for known, person in self.known:
            if hmac.compare_digest(known.encode(), token.encode()):
                found = person
        return found


class _PeopleFile(msgspec.Struct, forbid_unknown_fields=True):
    viewer: dict[str, list[_Token]] = {}
    operator: dict[str, list[_Token]] = {}
    admin: dict[str, list[_Token]] = {}


def read_tokens(text: str) -> Tokens:
    """Parse the file of tokens. Raises UsageError without any part of a token."""
    try:
        file = msgspec.toml.decode(text, type=_PeopleFile)
    except msgspec.DecodeError:
        raise UsageError(
            f"write TOML tables {', '.join(each.value for each in Role)}, each of names with lists of "
            f"tokens; a token has {TOKEN_CHARACTERS_MIN} or more printable ASCII characters, without spaces"
        ) from None
    known = tuple(
        (token, Principal(name, role))
        for role in Role
        for name, tokens in getattr(file, role.value).items()
        for token in tokens
    )
    if len({token for token, _ in known}) < len(known):
        raise UsageError("two names have the same token: give each name a token of its own")
    return Tokens(known)
