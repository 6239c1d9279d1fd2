"""How a daemon comes to its fabric's membership store: patiently while etcd is away, and not at all when it
is the wrong one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, TypeVar

from ostraca.cli.etcd_place import etcd_keys, etcd_settings
from ostraca_fabric.adapters.etcd.backoff import Backoff
from ostraca_fabric.adapters.etcd.found import fabric_at
from ostraca_fabric.adapters.etcd.membership import EtcdMembership
from ostraca_fabric.adapters.etcd.reports import EtcdReports
from ostraca_fabric.errors import MembershipError, StoreAwayError, UsageError
from ostraca_fabric.keys import fabric_key_check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ostraca.cli.etcd_place import EtcdPlace
    from ostraca_fabric.ids import FabricId

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WAIT_MIN_S = 0.2
_WAIT_MAX_S = 5.0


async def patiently(what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Return what *attempt* does, tried again for as long as the store is away; cancel it to end that.

    Raises MembershipError when the store has answered, and refused.
    """
    backoff, said = Backoff(_WAIT_MIN_S, _WAIT_MAX_S, random.Random()), ""  # noqa: S311 (waits are no secret)
    while True:
        try:
            done = await attempt()
        except StoreAwayError as error:
            if str(error) != said:
                said = str(error)
                log.warning("Can't %s yet, and keep trying: %s", what, said)
            await asyncio.sleep(backoff.next_s())
        else:
            if said:
                log.info("etcd answers again")
            return done


async def opened(
    place: EtcdPlace, wanted: FabricId | None, key: bytes | None, *, has_joined: bool = False
) -> tuple[FabricId, EtcdMembership]:
    """Return the fabric at *place* and its membership, which the caller closes.

    *key* is the fabric's; None for who needs none, and so has none. *has_joined*: who asks has been in the
    fabric *wanted* before.

    Raises StoreAwayError while etcd can't be reached, and MembershipError or UsageError that says what to do
    when there is no fabric, another than *wanted*, or one with another key.
    """
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    wanted = wanted or await _fabric_at(place)
    membership = await EtcdMembership.open(
        wanted,
        settings,
        dice=dice,
        keys=keys,
        key_check="" if key is None else fabric_key_check(key, wanted),
        has_joined=has_joined,
        lease_ttl_s=place.lease_ttl_s,
    )
    return wanted, membership


async def opened_reports(place: EtcdPlace, wanted: FabricId | None) -> tuple[FabricId, EtcdReports]:
    """Return the fabric at *place* and the reports of its enclosures, which the caller closes.

    Raises StoreAwayError while etcd can't be reached, and MembershipError or UsageError that says what to do
    when there is no fabric, or another than *wanted*.
    """
    settings, keys, dice = etcd_settings(place), etcd_keys(place), random.Random()  # noqa: S311
    wanted = wanted or await _fabric_at(place)
    return wanted, await EtcdReports.open(
        wanted, settings, keys=keys, dice=dice, lease_ttl_s=place.lease_ttl_s
    )


async def _fabric_at(place: EtcdPlace) -> FabricId:
    settings, keys = etcd_settings(place), etcd_keys(place)
    found = await fabric_at(keys, settings, dice=random.Random())  # noqa: S311
    if found is None:
        raise MembershipError(
            f"there is no fabric under {keys.text} of etcd at {', '.join(place.endpoints)}: check endpoints "
            "and prefix, or begin one with `ostraca fabric create`"
        )
    return found


def check_place(place: EtcdPlace) -> None:
    """Refuse what can't be a place. Raises UsageError and FormatError."""
    if not place.endpoints:
        message = "where is etcd? Give --etcd HOST:PORT, or etcd.endpoints in the settings"
        raise UsageError(message)
    etcd_settings(place)
    etcd_keys(place)
