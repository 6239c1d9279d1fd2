"""Where a fabric's etcd is: the options and settings by which commands are told, and what they make of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostraca_fabric.errors import UsageError
from ostraca_fabric.limits import check_above_zero

if TYPE_CHECKING:
    import argparse

    from ostraca_fabric.adapters.etcd.keys import Keys
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings

_LEASE_TTL_MAX_S = 300
_OPTIONS = (
    ("--prefix", "prefix", "PREFIX", "what all keys of the fabric begin with (default: /ostraca/default/)"),
    ("--etcd-ca", "ca", "FILE", "certificates of whom to believe that an etcd is ours: TLS towards etcd"),
    ("--etcd-cert", "cert", "FILE", "our own certificate towards etcd"),
    ("--etcd-key", "key", "FILE", "its private key"),
    ("--etcd-user", "user", "NAME", "a user of etcd's access control"),
    ("--etcd-password", "password_file", "FILE", "where that user's password lies; nobody else may read it"),
)


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """Where etcd is, and what is ours there."""

    endpoints: tuple[str, ...] = ()
    """``host:port`` of every member. One that does not answer is left for the next."""

    prefix: str = "/ostraca/default/"
    """What all keys of the fabric begin with. Fabrics that share an etcd have one each."""

    ca: str = ""
    """A file of certificates, in PEM, of whom we believe that an etcd is ours; empty: no TLS. Give it
    wherever etcd is not on this machine alone."""

    cert: str = ""
    """A file with our own certificate, in PEM, where etcd asks for one."""

    key: str = ""
    """The file of its private key."""

    user: str = ""
    """A user of etcd's own access control; empty where that is off."""

    password_file: str = ""
    """Where that user's password lies. Nobody else may read it. It is read again when
    etcd asks for it anew."""

    lease_ttl_s: float = 5.0
    """How long an agent that died is still believed to live, and its shards are nobody else's: 1 s to 5
    minutes, in whole seconds. Longer than etcd's elections take, or every one of them costs all claims; etcd
    makes it no less than that."""

    request_timeout_s: float = 1.0
    """How long one member may take to answer before the next is asked. An election takes about as long."""

    operation_timeout_s: float = 5.0
    """How long an operation is tried in all, over all members."""

    def __post_init__(self) -> None:
        """Refuse halves of pairs, and times in which etcd can't answer."""
        check_above_zero(self, "request_timeout_s", "operation_timeout_s")
        if not 1 <= self.lease_ttl_s <= _LEASE_TTL_MAX_S:
            message = (
                f"lease_ttl_s is {self.lease_ttl_s}: make it 1 to {_LEASE_TTL_MAX_S} seconds, for so long "
                "nobody serves the shards of an agent that died"
            )
            raise UsageError(message)
        if self.lease_ttl_s != int(self.lease_ttl_s):
            message = f"lease_ttl_s is {self.lease_ttl_s}: make it whole seconds, as etcd counts them"
            raise UsageError(message)
        if bool(self.cert) != bool(self.key):
            message = "etcd.cert and etcd.key go together: give both, or neither"
            raise UsageError(message)
        if self.cert and not self.ca:
            message = "etcd.cert is given: give etcd.ca as well, or etcd is asked without TLS"
            raise UsageError(message)
        if bool(self.user) != bool(self.password_file):
            message = "etcd.user and etcd.password_file go together: give both, or neither"
            raise UsageError(message)

    def options(self) -> str:
        """Return the options that say the same, for people to copy."""
        given = [("--etcd", endpoint) for endpoint in self.endpoints]
        given += [(flag, value) for flag, name, _, _ in _OPTIONS if (value := getattr(self, name))]
        return " ".join(f"{flag} {shlex.quote(value)}" for flag, value in given)

    @property
    def text(self) -> str:
        """Say where it is, for people."""
        return f"{self.prefix} of etcd at {', '.join(self.endpoints)}"


def add_etcd_options(parser: argparse.ArgumentParser) -> None:
    """Let the user say where etcd is, for ``etcd_options``."""
    parser.add_argument(
        "--etcd",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a member of etcd (may be repeated: name all of them)",
    )
    for flag, _, metavar, meaning in _OPTIONS:
        parser.add_argument(flag, dest=_dest(flag), metavar=metavar, help=meaning)


def etcd_options(options: argparse.Namespace) -> list[tuple[str, str, str | list[str]]]:
    """Return what was given, as settings are: the option, the setting within its group, the value."""
    given: list[tuple[str, str, str | list[str]]] = [("--etcd", "endpoints", options.etcd)]
    given += [(flag, name, getattr(options, _dest(flag))) for flag, name, _, _ in _OPTIONS]
    return [each for each in given if each[2]]


def etcd_settings(place: EtcdPlace) -> EtcdSettings:
    """Return how to reach it. Raises UsageError, and FormatError where the password can't be read."""
    from ostraca.cli.serve.secret_files import read_secret
    from ostraca_fabric.adapters.etcd.settings import EtcdSettings, EtcdTls, EtcdUser

    tls = user = None
    if place.ca:
        pair = [Path(each) if each else None for each in (place.cert, place.key)]
        tls = EtcdTls(Path(place.ca), *pair)
    if place.user:
        file = Path(place.password_file)

        def password() -> str:
            return read_secret(file).decode(errors="replace").strip()

        password()  # what can't be read is told before anything begins
        user = EtcdUser(place.user, password)
    return EtcdSettings(
        endpoints=place.endpoints,
        tls=tls,
        user=user,
        request_timeout_s=place.request_timeout_s,
        operation_timeout_s=place.operation_timeout_s,
    )


def etcd_keys(place: EtcdPlace) -> Keys:
    """Return where the fabric lies there. Raises UsageError."""
    from ostraca_fabric.adapters.etcd.keys import Keys

    return Keys(place.prefix)


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
