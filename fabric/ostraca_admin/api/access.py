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
import tomllib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ostraca_fabric.errors import UsageError

TOKEN_CHARACTERS_MIN = 16


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


def read_tokens(text: str) -> Tokens:
    """Parse the file of tokens. Raises UsageError without any part of a token."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        message = "invalid TOML"
        raise UsageError(message) from None
    roles = {role.value: role for role in Role}
    unknown = set(table) - set(roles)
    if unknown:
        raise UsageError(f"{len(unknown)} unknown tables: use only {', '.join(roles)}")
    known = tuple(
        (token, Principal(name, role))
        for word, role in roles.items()
        for name, tokens in _people(table.get(word, {}), word).items()
        for token in _checked(tokens)
    )
    if len({token for token, _ in known}) < len(known):
        message = "two names have the same token: give each name a token of its own"
        raise UsageError(message)
    return Tokens(known)


def _people(found: object, role: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{role} must be a table of names with tokens")
    return found


def _checked(tokens: object) -> list[str]:
    if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
        message = "tokens must be lists of strings"
        raise UsageError(message)
    for each in tokens:
        if len(each) < TOKEN_CHARACTERS_MIN or not each.isascii() or not each.isprintable() or " " in each:
            raise UsageError(
                f"a token must have {TOKEN_CHARACTERS_MIN} or more printable ASCII characters, without spaces"
            )
    return tokens
