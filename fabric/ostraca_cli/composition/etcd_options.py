"""Location of a fabric's etcd: options and settings."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_cli.command import option
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.limits import check_above_zero

if TYPE_CHECKING:
    import argparse

    from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
    from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys

_LEASE_TTL_MAX_S = 300
_OPTIONS = (
    ("--prefix", "prefix", "PREFIX", "prefix of all keys of the fabric (default: /ostraca/default/)"),
    ("--etcd-ca", "ca", "FILE", "CA certificates of etcd: enables TLS towards etcd"),
    ("--etcd-cert", "cert", "FILE", "client certificate towards etcd"),
    ("--etcd-key", "key", "FILE", "private key of the client certificate"),
    ("--etcd-user", "user", "NAME", "user of etcd's access control"),
    ("--etcd-password", "password_file", "FILE", "password file of this user, closed to other users"),
)


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """Address, prefix and credentials of etcd."""

    endpoints: tuple[str, ...] = ()
    """``host:port`` of every member. If a member does not answer, the next is asked."""

    prefix: str = "/ostraca/default/"
    """Prefix of all keys of the fabric. Distinct for each fabric in an etcd."""

    ca: str = ""
    """PEM file of etcd's CA certificates; empty: no TLS. Required wherever etcd runs on other machines
    too."""

    cert: str = ""
    """PEM file of the client certificate, where etcd asks for one."""

    key: str = ""
    """File of the client certificate's private key."""

    user: str = ""
    """User of etcd's access control; empty if access control is off."""

    password_file: str = ""
    """File of the user's password. Other users must have no access. Read again at each authentication."""

    lease_ttl_s: float = 5.0
    """Lifetime of leases: a dead agent's shards have no new owner until then. 1 s to 5 minutes, in whole
    seconds. Longer than etcd's elections, or each costs all claims; etcd enforces the minimum."""

    request_timeout_s: float = 1.0
    """Time limit for an answer, before the next member is asked. An election takes about as long."""

    operation_timeout_s: float = 5.0
    """Time limit of an operation over all members."""

    awaits_fabric: bool = False
    """Whether a first start waits until the fabric is created, as in Kubernetes, where everything starts at
    once. By default a daemon without a fabric ends."""

    def __post_init__(self) -> None:
        """Raise UsageError for incomplete pairs and impossible times."""
        check_above_zero(self, "request_timeout_s", "operation_timeout_s")
        if not 1 <= self.lease_ttl_s <= _LEASE_TTL_MAX_S:
            raise UsageError(
                f"lease_ttl_s is {self.lease_ttl_s}: make it 1 to {_LEASE_TTL_MAX_S} seconds; a dead "
                "agent's shards are unavailable for this long"
            )
        if self.lease_ttl_s != int(self.lease_ttl_s):
            raise UsageError(
                f"lease_ttl_s is {self.lease_ttl_s}: etcd counts whole seconds, so give a whole number"
            )
        if bool(self.cert) != bool(self.key):
            raise UsageError("etcd.cert and etcd.key go together: give both, or neither")
        if self.cert and not self.ca:
            raise UsageError("etcd.cert is given without etcd.ca: give etcd.ca as well, to use TLS")
        if bool(self.user) != bool(self.password_file):
            raise UsageError("etcd.user and etcd.password_file go together: give both, or neither")

    def options(self) -> str:
        """Return the equivalent command-line options, for people to copy into any directory."""
        given = [("--etcd", endpoint) for endpoint in self.endpoints]
        given += [
            (flag, str(Path(value).absolute()) if what == "FILE" else value)
            for flag, name, what, _ in _OPTIONS
            if (value := getattr(self, name))
        ]
        return " ".join(f"{flag} {shlex.quote(value)}" for flag, value in given)

    @property
    def text(self) -> str:
        """Return prefix and endpoints, for people."""
        return f"{self.prefix} of etcd at {', '.join(self.endpoints)}"


ETCD_OPTIONS = (
    option(
        "--etcd",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help=("address of a member of etcd (repeat the option, or separate by commas: name all members)"),
    ),
    *(option(flag, metavar=metavar, help=meaning) for flag, _, metavar, meaning in _OPTIONS),
)
"""Options for the location of etcd, for ``etcd_options``."""


def etcd_options(options: argparse.Namespace) -> list[tuple[str, str, str | list[str]]]:
    """Return the given options as settings: (option, setting in its group, value)."""
    listed = [each.strip() for words in options.etcd for each in words.split(",")]
    endpoints = [each for each in listed if each] if any(listed) else listed
    given: list[tuple[str, str, str | list[str]]] = [("--etcd", "endpoints", endpoints)]
    values = vars(options)
    given += [(flag, name, values[flag.strip("-").replace("-", "_")]) for flag, name, _, _ in _OPTIONS]
    return [each for each in given if each[2]]


def etcd_settings(place: EtcdPlace) -> EtcdSettings:
    """Return the client settings for etcd.

    Raises UsageError, and FormatError if the password is unreadable.
    """
    from ostraca_cli.composition.secret_files import read_secret
    from ostraca_fabric.membership.etcd.client.settings import EtcdSettings, EtcdUser
    from ostraca_fabric.sockets.tls import TlsFiles

    tls = user = None
    if place.ca:
        pair = [Path(each) if each else None for each in (place.cert, place.key)]
        tls = TlsFiles(Path(place.ca), *pair)
    if place.user:
        file = Path(place.password_file)

        def password() -> str:
            return read_secret(file).decode(errors="replace").strip()

        password()  # read now, so that an unreadable file fails before any work begins
        user = EtcdUser(place.user, password)
    return EtcdSettings(
        endpoints=place.endpoints,
        tls=tls,
        user=user,
        request_timeout_s=place.request_timeout_s,
        operation_timeout_s=place.operation_timeout_s,
    )


def etcd_keys(place: EtcdPlace) -> EtcdKeys:
    """Return the keys of the fabric in etcd; raises UsageError."""
    from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys

    return EtcdKeys(place.prefix)
