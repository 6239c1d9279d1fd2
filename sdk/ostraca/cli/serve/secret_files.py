"""Secrets from files: the fabric's key, and who may speak for whom.

A file that others can read holds no secret, and one that others can write holds theirs, so both are refused.
No message repeats what a file holds.

The file of tokens is TOML::

    fabric = ["..."]          # tokens of other agents and of operators

    [tokens]                  # of workers, by tenant: several while one replaces another
    team-a = ["..."]

    [users]                   # users of this machine, by tenant, on unix sockets
    team-a = [1000]
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from typing import TYPE_CHECKING, Any

from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.ids import TenantId, checked_name
from ostraca_fabric.keys import FABRIC_KEY_BYTES
from ostraca_fabric.wire.handshake import ROOT_UID, Access

if TYPE_CHECKING:
    from pathlib import Path

SECRET_BYTES_MAX = 1 << 20
TOKEN_CHARACTERS_LEAST = 16
"""Shorter ones can be guessed."""

_DHCHAP = "DHHC-1:"
"""What a secret begins with: NVMe TCP transport specification, "NVMe-oF in-band authentication"."""

_GROUPS = ("fabric", "tokens", "users", "own_user_is_trusted")


def read_secret(path: Path) -> bytes:
    """Return what a file holds that nobody else can read or write: its owner is this user, or root.

    A group may read it, as where a container's user gets its secrets. Raises FormatError.
    """
    try:
        with path.open("rb") as opened:
            found = os.fstat(opened.fileno())  # of what is read, and not of what lies there by then
            _check_owner(path, found)
            content = opened.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise FormatError(f"a secret can't be read: {error}") from error
    if len(content) > SECRET_BYTES_MAX:
        raise FormatError(f"{path} is longer than {SECRET_BYTES_MAX} bytes: is it a file of secrets?")
    return content


def read_fabric_key(path: Path) -> bytes:
    """Return the fabric's key. Raises FormatError."""
    key = read_secret(path)
    if len(key) != FABRIC_KEY_BYTES:
        raise FormatError(
            f"{path} has {len(key)} bytes where a fabric key has {FABRIC_KEY_BYTES}: take the file that the "
            "fabric was made with"
        )
    return key


def read_nvme_secret(directory: Path, name: str) -> str:
    """Return the DH-HMAC-CHAP secret that an enclosure was registered with the *name* of; empty for none.

    Raises FormatError and UsageError.
    """
    if not name:
        return ""
    path = directory / checked_name("secret", name)
    secret = read_secret(path).decode(errors="replace").strip()
    if not secret.startswith(_DHCHAP) or not secret.endswith(":") or not secret.isascii() or " " in secret:
        raise FormatError(f"{path} holds no DH-HMAC-CHAP secret: one is made by `nvme gen-dhchap-key`")
    return secret


def read_access(path: Path, own_uid: int) -> Access:
    """Return who may speak for whom, as the file of tokens says. Raises FormatError."""
    try:
        table = tomllib.loads(read_secret(path).decode())
    except ValueError as error:  # bad TOML and bad UTF-8; what is wrong there may be a token, so not *error*
        raise FormatError(f"{path} is no TOML{at_line(error)}") from None
    try:
        return _access(table, own_uid)
    except UsageError as error:
        raise FormatError(f"{path} is no file of tokens: {error}") from None


def _access(table: dict[str, Any], own_uid: int) -> Access:
    unknown = set(table) - set(_GROUPS)
    if unknown:
        raise UsageError(f"it may have {', '.join(_GROUPS)}, and has {len(unknown)} other names")
    return Access(
        own_uid,
        tenant_tokens={tenant: _tokens(tokens) for tenant, tokens in _by_tenant(table, "tokens").items()},
        tenant_uids={tenant: _users(users) for tenant, users in _by_tenant(table, "users").items()},
        fabric_tokens=_tokens(table.get("fabric", [])),
        own_user_is_trusted=_is_trusted(table.get("own_user_is_trusted", True)),
    )


def _is_trusted(said: object) -> bool:
    if not isinstance(said, bool):
        raise UsageError("own_user_is_trusted is true or false")
    return said


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), ROOT_UID):
        raise FormatError(f"{path} belongs to user {found.st_uid}, who could change it: chown it")
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP):
        raise FormatError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod 600 {path}"
        )


def _by_tenant(table: dict[str, Any], group: str) -> dict[TenantId, Any]:
    found = table.get(group, {})
    if not isinstance(found, dict):
        raise UsageError(f"{group} is a table by tenant")
    return {TenantId(checked_name("tenant", tenant)): value for tenant, value in found.items()}


def _tokens(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        message = "tokens are lists of texts"
        raise UsageError(message)
    for each in given:
        if len(each) < TOKEN_CHARACTERS_LEAST or not each.isascii() or not each.isprintable() or " " in each:
            raise UsageError(
                f"a token has {TOKEN_CHARACTERS_LEAST} or more printable ASCII characters, no space"
            )
    return tuple(given)


def _users(given: object) -> frozenset[int]:
    if not isinstance(given, list) or not all(type(each) is int and each >= 0 for each in given):
        message = "users are lists of numbers"
        raise UsageError(message)
    return frozenset(given)


def at_line(error: ValueError) -> str:
    """Say in which line a file is no TOML, and nothing of what is there: that may be a secret."""
    found = re.search(r"\(at line ([0-9]+), column [0-9]+\)$", str(error))
    return f": see line {found[1]}" if found else ""
