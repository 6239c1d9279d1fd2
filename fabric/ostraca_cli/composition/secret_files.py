"""Secrets from files: the fabric's key and the tokens.

A file readable by other users holds no secret, and a file writable by other users may hold foreign secrets;
the module refuses both. Error messages never repeat file contents.

The file of tokens is TOML::

    fabric = ["..."]          # tokens of other agents and of operators

    [tokens]                  # of workers, by tenant: several while one replaces another
    team-a = ["..."]

    [users]                   # users of this machine, by tenant, on unix sockets
    team-a = [1000]
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.model.ids import TenantId, checked_name
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.tables.digests import FABRIC_KEY_BYTES
from ostraca_fabric.wire.handshake import ROOT_UID, Access

SECRET_BYTES_MAX = 1 << 20
TOKEN_CHARACTERS_LEAST = 16
"""Minimum length; shorter tokens can be guessed."""

_TOKEN = re.compile(f"[!-~]{{{TOKEN_CHARACTERS_LEAST},}}")
_T = TypeVar("_T")

_DHCHAP = "DHHC-1:"
"""Prefix of a secret: NVMe TCP transport specification, "NVMe-oF in-band authentication"."""


def read_secret(path: Path) -> bytes:
    """Return the content of a file owned by this user or root, closed to others.

    The file's group may read the file, as in containers with secrets for a group. Raises FormatError.
    """
    try:
        with path.open("rb") as opened:
            found = os.fstat(opened.fileno())  # the open file: the path may name another by now
            _check_owner(path, found)
            content = opened.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise FormatError(f"a secret can't be read: {explained(error)}") from error
    if len(content) > SECRET_BYTES_MAX:
        raise FormatError(f"{path} is longer than {SECRET_BYTES_MAX} bytes: not a file of secrets")
    return content


def read_fabric_key(path: Path) -> bytes:
    """Return the fabric's key; raises FormatError."""
    key = read_secret(path)
    if len(key) != FABRIC_KEY_BYTES:
        raise FormatError(
            f"{path} has {len(key)} bytes, and a fabric key has {FABRIC_KEY_BYTES}: use the file from "
            "the creation of the fabric"
        )
    return key


def read_nvme_secret(directory: Path, name: str) -> str:
    """Return the DH-HMAC-CHAP secret *name* of an enclosure's registration.

    Returns an empty text for an empty name. Raises FormatError and UsageError.
    """
    if not name:
        return ""
    path = directory / checked_name("secret", name)
    secret = read_secret(path).decode(errors="replace").strip()
    if not secret.startswith(_DHCHAP) or not secret.endswith(":") or not secret.isascii() or " " in secret:
        raise FormatError(f"{path} holds no DH-HMAC-CHAP secret: create a secret with `nvme gen-dhchap-key`")
    return secret


def read_access(path: Path, own_uid: int) -> Access:
    """Return tokens and users from the file of tokens; raises FormatError."""
    try:
        table = tomllib.loads(read_secret(path).decode())
    except ValueError as error:  # bad TOML or UTF-8; *error* may quote a token
        raise FormatError(f"{path} is no TOML{at_line(error)}") from None
    try:
        return _access(table, own_uid)
    except (UsageError, msgspec.ValidationError) as error:
        raise FormatError(f"{path} is no file of tokens: {error}") from None


class _TokensFile(msgspec.Struct):
    fabric: tuple[str, ...] = ()
    tokens: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    users: dict[str, frozenset[Annotated[int, msgspec.Meta(ge=0)]]] = msgspec.field(default_factory=dict)
    own_user_is_trusted: bool = True


def _access(table: dict[str, Any], own_uid: int) -> Access:
    names = _TokensFile.__struct_fields__
    if unknown := set(table) - set(names):  # an unknown name may be a misplaced token
        raise UsageError(f"allowed names are {', '.join(names)}, and there are {len(unknown)} other names")
    file = msgspec.convert(table, _TokensFile)
    for token in itertools.chain(file.fabric, *file.tokens.values()):
        if not _TOKEN.fullmatch(token):
            raise UsageError(
                f"a token has {TOKEN_CHARACTERS_LEAST} or more printable ASCII characters, no space"
            )
    return Access(
        own_uid,
        tenant_tokens=_by_tenant(file.tokens),
        tenant_uids=_by_tenant(file.users),
        fabric_tokens=file.fabric,
        own_user_is_trusted=file.own_user_is_trusted,
    )


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), ROOT_UID):
        raise FormatError(f"{path} belongs to user {found.st_uid}, not to this user or root: chown the file")
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP):
        raise FormatError(
            f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):o}): chmod 600 {path}"
        )


def _by_tenant(table: dict[str, _T]) -> dict[TenantId, _T]:
    return {TenantId(checked_name("tenant", tenant)): value for tenant, value in table.items()}


def at_line(error: ValueError) -> str:
    """Return the line number of a TOML error, without content that may be secret."""
    found = re.search(r"\(at line ([0-9]+), column [0-9]+\)$", str(error))
    return f": see line {found[1]}" if found else ""
