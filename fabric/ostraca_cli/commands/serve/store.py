"""Access of a daemon to the membership store.

Daemons wait while etcd is away, and refuse a store with another fabric. A store without a fabric is refused,
or counts as away with ``etcd.awaits_fabric``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ostraca_cli.composition.etcd_options import EtcdPlace, etcd_keys, etcd_settings
from ostraca_fabric.errors import MembershipError, StoreAwayError, UsageError
from ostraca_fabric.membership.etcd.admin_records import EtcdReports
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.store import fabric_at
from ostraca_fabric.model.fabric_map import AgentRecord
from ostraca_fabric.model.ids import FabricId, StartId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.policies.backoff import Backoff
from ostraca_fabric.tables.digests import fabric_key_check

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Process = TypeVar("_Process", "AgentRecord", "EnclosureReport")

_WAIT_MIN_S = 0.2
_WAIT_MAX_S = 5.0
_POLL_S = 0.25
_LEASES_WAITED = 2


async def retry_while_away(
    purpose: str,
    attempt: Callable[[], Awaitable[_T]],
    *,
    say: Callable[[str], None] = lambda _: None,
    within_s: float = math.inf,
) -> _T:
    """Repeat *attempt* with backoff while etcd is away, at most *within_s*, and return its result.

    Cancel the call to end the wait. *say* receives the present problem, and an empty text after recovery.
    Raises StoreAwayError after *within_s*, and MembershipError if the store responded with a refusal.
    """
    backoff, problem = Backoff(_WAIT_MIN_S, _WAIT_MAX_S, random.Random()), ""  # noqa: S311 (waits are no secret)
    until_s = time.monotonic() + within_s
    while True:
        try:
            done = await attempt()
        except StoreAwayError as error:
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > until_s:
                raise
            if str(error) != problem:
                problem = str(error)
                log.warning("Cannot %s yet, retrying: %s", purpose, problem)
                say(problem)
            await asyncio.sleep(pause_s)
        else:
            if problem:
                log.info("etcd answers again")
                say("")
            return done


async def open_membership(
    place: EtcdPlace, wanted: FabricId | None, key: bytes | None, *, has_joined: bool = False
) -> tuple[FabricId, EtcdMembership]:
    """Return the fabric at *place* and its membership, which the caller closes.

    *key* is the fabric's key; None for callers without the key. *has_joined*: the caller joined the fabric
    *wanted* before.

    Raises StoreAwayError while etcd is unreachable. Raises MembershipError or UsageError with advice if there
    is no fabric, a fabric other than *wanted*, or a fabric with another key.
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


async def open_reports(place: EtcdPlace, wanted: FabricId | None) -> tuple[FabricId, EtcdReports]:
    """Return the fabric at *place* and its enclosure reports, which the caller closes.

    Raises StoreAwayError while etcd is unreachable. Raises MembershipError or UsageError with advice if there
    is no fabric, or a fabric other than *wanted*.
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
        absence = StoreAwayError if place.awaits_fabric else MembershipError
        raise absence(
            f"no fabric exists under {keys.text} of etcd at {', '.join(place.endpoints)}: check endpoints "
            "and prefix, or create a fabric with `ostraca fabric create`"
        )
    return found


async def await_namesake(
    find: Callable[[], Awaitable[_Process | None]], own: StartId | None, place: EtcdPlace
) -> _Process | None:
    """Wait until no other process has a daemon's id; return a process that keeps the id, or None.

    *find* returns the registered process. *own* is the previous process of the daemon's state directory,
    which is gone, whatever its lease says.
    """
    until_s = time.monotonic() + _LEASES_WAITED * place.lease_ttl_s
    while (process := await find()) is not None and process.start != own:
        if time.monotonic() >= until_s:
            return process
        await asyncio.sleep(_POLL_S)
    return None


def check_place(place: EtcdPlace) -> None:
    """Raise UsageError or FormatError for an invalid location of etcd."""
    if not place.endpoints:
        raise UsageError(
            "the address of etcd is missing: give --etcd HOST:PORT, or etcd.endpoints in the settings"
        )
    etcd_settings(place)
    etcd_keys(place)
