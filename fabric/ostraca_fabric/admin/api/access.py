"""Who may do what: bearer tokens, each of a person or a program with a role. Pure but for the header.

The file of tokens is TOML, and is read again when it changes::

    [admin]                 # everything
    alice = ["..."]

    [operator]              # drain, expand, replace and the like of what is registered
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

TOKEN_CHARACTERS_LEAST = 16


class Role(Enum):
    """What somebody may do; each may what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def may(self, needed: Role) -> bool:
        """Say whether this role is enough."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Person:
    """Who asks."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class Tokens:
    """Everybody's."""

    known: tuple[tuple[str, Person], ...]

    def whose(self, token: str) -> Person | None:
        """Return whose token it is. Every one is compared, each in constant time."""
        found = None
        for known, person in self.known:
            if hmac.compare_digest(known.encode(), token.encode()):
                found = person
        return found


def read_tokens(text: str) -> Tokens:
    """Read the file of tokens. Raises UsageError, which repeats nothing that may be a token."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        message = "it is no TOML"
        raise UsageError(message) from None
    roles = {role.value: role for role in Role}
    unknown = set(table) - set(roles)
    if unknown:
        raise UsageError(f"it may have {', '.join(roles)}, and has {len(unknown)} other names")
    known = tuple(
        (token, Person(name, role))
        for word, role in roles.items()
        for name, tokens in _people(table.get(word, {}), word).items()
        for token in _checked(tokens)
    )
    if len({token for token, _ in known}) < len(known):
        message = "two names have one token: nobody could tell them apart"
        raise UsageError(message)
    return Tokens(known)


def _people(found: object, role: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{role} is a table of names with their tokens")
    return found


def _checked(tokens: object) -> list[str]:
    if not isinstance(tokens, list) or not all(isinstance(each, str) for each in tokens):
        message = "tokens are lists of texts"
        raise UsageError(message)
    for each in tokens:
        if len(each) < TOKEN_CHARACTERS_LEAST or not each.isascii() or not each.isprintable() or " " in each:
            raise UsageError(
                f"a token has {TOKEN_CHARACTERS_LEAST} or more printable ASCII characters, no space"
            )
    return tokens
