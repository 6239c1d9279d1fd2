"""Admitted hosts of an enclosure, from a file of secrets.

TOML::

    [hosts."nqn.2014-08.org.nvmexpress:uuid:0f0e..."]
    secret = "DHHC-1:00:...:"              # of the host; without a secret, the name alone suffices
    controller_secret = "DHHC-1:00:...:"   # of the enclosure, shown to the host; optional

Error messages never repeat file contents.
"""

from __future__ import annotations

import base64
import binascii
import re
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ostraca_cli.composition.secret_files import at_line, read_secret
from ostraca_enclosure.plan import HostSecrets
from ostraca_fabric.errors import FormatError, UsageError
from ostraca_fabric.model.target import check_nqn

HOSTS_MAX = 4096
_Text = Annotated[str, msgspec.Meta(pattern="^[ -~]*$")]
_DHCHAP = re.compile(r"DHHC-1:(0[0-3]):([A-Za-z0-9+/]+={0,2}):\Z")
_KEY_BYTES = {"00": (32, 48, 64), "01": (32,), "02": (48,), "03": (64,)}
_CRC_BYTES = 4


class _Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    secret: _Text = ""
    controller_secret: _Text = ""


class _HostsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: Annotated[dict[str, _Host], msgspec.Meta(min_length=1, max_length=HOSTS_MAX)]


def read_hosts(path: Path, *, is_files: bool) -> Mapping[str, HostSecrets]:
    """Return the secrets of admitted hosts, by NQN.

    Secrets are DH-HMAC-CHAP secrets, or any text for enclosures on files. Raises FormatError.
    """
    try:
        table = tomllib.loads(read_secret(path).decode())
    except ValueError as error:  # bad TOML or UTF-8; *error* may quote a secret
        raise FormatError(f"{path} is invalid TOML{at_line(error)}") from None
    try:
        listed = msgspec.convert(table, _HostsFile).hosts
        return {check_nqn(nqn): _secrets(nqn, given, is_files=is_files) for nqn, given in listed.items()}
    except msgspec.ValidationError:
        raise FormatError(
            f'{path} is no valid file of hosts: write 1 to {HOSTS_MAX} tables [hosts."nqn..."], and there '
            "only secret and controller_secret, strings of printable ASCII characters"
        ) from None
    except UsageError as error:
        raise FormatError(f"{path} is no valid file of hosts: {error}") from None


def _secrets(nqn: str, given: _Host, *, is_files: bool) -> HostSecrets:
    for each in (given.secret, given.controller_secret):
        if each and not is_files and not is_dhchap(each):
            raise UsageError(
                f"a secret of {nqn} is no complete DH-HMAC-CHAP secret: create one with `nvme "
                f"gen-dhchap-key -n {nqn}`"
            )
    if given.controller_secret and not given.secret:
        raise UsageError(f"{nqn} has a controller_secret without a secret: add the secret of the host")
    return HostSecrets(given.secret, given.controller_secret)


def is_dhchap(secret: str) -> bool:
    """Check form, length and checksum of a DH-HMAC-CHAP secret."""
    matched = _DHCHAP.match(secret)
    if matched is None:
        return False
    try:
        decoded = base64.b64decode(matched[2], validate=True)
    except (binascii.Error, ValueError):
        return False
    key, crc = decoded[:-_CRC_BYTES], decoded[-_CRC_BYTES:]
    return len(key) in _KEY_BYTES[matched[1]] and zlib.crc32(key).to_bytes(_CRC_BYTES, "little") == crc
