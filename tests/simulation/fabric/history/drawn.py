"""What a history is played on, and what may go wrong in it: drawn before it begins."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.fabric.history.strikes import BAD_DRIVES, DIRECT, ENCLOSURES, HARSH, NARROW
from tests.simulation.fabric.world.agent_memory import MemoryReads
from tests.simulation.fabric.world.blocks import VOLUMES
from tests.simulation.fabric.world.direct import DirectReads
from tests.simulation.fabric.world.process import REQUESTS_MAX, Lateness
from tests.simulation.fabric.world.world import STRIKES, Setup
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.simulated_membership import StoreFaults
from tests.support.simulated.simulated_transport import TransferFaults

from ostraca_fabric.wire.messages import WIRE_VERSION

STRIKES_IN_CALM = ("store_goes_down", "agent_ends")
"""What need not end a calm."""

_CALM, _WITH_BAD_DRIVES, _WITH_ENCLOSURES, _WITH_HARSH = 0.1, 0.4, 0.4, 0.3
"""Of histories: those in which these things go wrong."""

_CLOSE, _TOO_LATE = 0.3, 0.1
"""Of histories: those in which writes land just in time, and too late."""

_DIRECT = 0.3
"""Of histories: those in which workers read drives themselves."""

_CACHED = 0.4
"""Of these that would have a cache: those that do. What is there need not be read from drives."""

_NARROW = 0.5
"""Of histories with inline workers: those in which links grow narrow."""

_FROM_MEMORY, _SMALL = 0.3, 0.7
"""Of histories: those in which workers read agents' memory. Of these: those with small caches."""

_CHAINED = 0.5
"""Of a volume's blocks: those that are in chains."""


def drawn_setup(dice: random.Random) -> Setup:
    """Draw what a history is played on."""
    setup = Setup(
        hosts=dice.choice([2, 2, 3]),
        enclosures=dice.choice([1, 1, 2]),
        drives=dice.choice([1, 2]),
        segments=dice.choice([3, 4, 6]),
        numbers=dice.choice([36, 72, 144]),
        volumes=VOLUMES,
        chained=_CHAINED,
        blocks=dice.choice([(1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (8, 16, 32)]),
        drive_faults=DriveFaults(
            stalls=dice.choice([0.0, 0.0, 0.02]),
            stall_s=0.8,
            late=dice.choice([0.0, 0.5, 1.0]),
            late_s=4.0,
            service_s=dice.choice([0.0001, 0.001, 0.003]),
        ),
        transfer_faults=TransferFaults(
            failures=dice.choice([0.0, 0.0, 0.05]),
            stalls=dice.choice([0.0, 0.0, 0.05]),
            late=dice.choice([0.0, 0.5, 1.0]),
        ),
        lies=dice.choice([0.0, 0.0, 0.0, 0.05]),
        has_cache=dice.random() < 0.5,
        drift=dice.choice([0.0, 0.001]),
        reach=StoreFaults(
            twice=dice.choice([0.0, 0.0, 0.2]),
            lost_requests=dice.choice([0.0, 0.0, 0.05]),
            lost_answers=dice.choice([0.0, 0.0, 0.05]),
            late_requests=dice.choice([0.0, 0.0, 0.05]),
        ),
        inline=dice.choice([0.0, 0.0, 0.5]),
        wires=dice.choice([(WIRE_VERSION,), (WIRE_VERSION, WIRE_VERSION + 1, WIRE_VERSION + 7)]),
        told=dice.choice([1.0, 0.5]),
        silence=dice.choice([0.0, 0.5]),
        strikes=drawn_strikes(dice),
        requests_max=dice.choice([*[REQUESTS_MAX] * 8, 2, 6]),
    )
    roll = dice.random()
    if roll < _CLOSE:
        setup = close(setup, dice)
    elif roll < _CLOSE + _TOO_LATE:
        setup = too_late(setup)
    aside = random.Random(repr(dice.getstate()))  # so that other histories stay as they are
    setup = direct(setup, aside) if aside.random() < _DIRECT else setup
    setup = in_place(setup, aside) if setup.inline else setup
    setup = replace(setup, pushed=random.Random(repr(("pushed", dice.getstate()))).choice([0.0, 0.5, 1.0]))
    return from_memory(setup, aside) if aside.random() < _FROM_MEMORY else setup


def close(setup: Setup, dice: random.Random) -> Setup:
    """Let what owners wait for a write be next to no more than how late it may be.

    It stands still for ``pause_max_s`` twice at most, before it is submitted and once it is decided on, and
    its drive delays it; ``late_write_s`` has half a second more.
    """
    pause_s, late_s = dice.choice([1.0, 3.0, 8.0]), dice.choice([1.0, 8.0])
    faults = replace(
        setup.drive_faults,
        service_s=dice.choice([0.003, 0.06]),
        late_from_s=0.8 * late_s,
        late_s=late_s,
        late=1.0,
    )
    lateness = Lateness(
        hold_s=dice.choice([0.5, 2.0]),
        pause_max_s=pause_s,
        late_write_s=2 * pause_s + faults.stall_s + late_s + 0.5,
        adopt_every_s=dice.choice([10.0, 60.0]),
    )
    strikes = tuple(name for name in setup.strikes if name != "drive_is_slow")  # slower than that
    return replace(setup, drive_faults=faults, lateness=lateness, strikes=strikes)


def direct(setup: Setup, dice: random.Random) -> Setup:
    """Let workers of one tenant read drives themselves, more or less well."""
    reads = DirectReads(
        workers=dice.choice([1.0, 1.0, 0.6]),
        failures=dice.choice([0.0, 0.02, 0.2]),
        hangs=dice.choice([0.0, 0.005, 0.05]),
        hang_s=dice.choice([2.0, 20.0]),
        strays=dice.choice([0.0, 0.0, 0.2]),
        silent_s=dice.choice([0.3, 0.3, 2.0]),
        retry_s=dice.choice([0.2, 2.0, 30.0]),
    )
    return replace(
        setup,
        direct=reads,
        volumes=VOLUMES[:2],
        has_cache=setup.has_cache and dice.random() < _CACHED,
        strikes=(*setup.strikes, *DIRECT),
    )


def in_place(setup: Setup, dice: random.Random) -> Setup:
    """Let workers have regions; links to some are at times so narrow that operations end in mid frame."""
    strikes = (*setup.strikes, *NARROW) if dice.random() < _NARROW else setup.strikes
    return replace(setup, regions=dice.choice([0.5, 0.5, 1.0]), strikes=strikes)


def from_memory(setup: Setup, dice: random.Random) -> Setup:
    """Let workers copy blocks out of the memory of the agent beside them, more or less fast."""
    reads = MemoryReads(
        workers=dice.choice([1.0, 1.0, 0.6]),
        pauses=dice.choice([0.0, 0.2, 0.5]),
        pause_s=dice.choice([0.05, 0.5, 2.0]),
        tears=dice.choice([0.0, 0.5]),
    )
    has_small_cache = dice.random() < _SMALL
    return replace(setup, memory=reads, has_cache=True, has_small_cache=has_small_cache)


def too_late(setup: Setup) -> Setup:
    """Let writes land later than owners wait for them."""
    faults = replace(setup.drive_faults, service_s=0.06, late=1.0, late_s=40.0)
    lateness = Lateness(hold_s=2.0, late_write_s=5.0, pause_max_s=4.0)
    return replace(setup, drive_faults=faults, lateness=lateness, expects_all=False)


def drawn_strikes(dice: random.Random) -> tuple[str, ...]:
    """Draw what may go wrong in a history: in some nothing but that the store is down, and gets go on."""
    if dice.random() < _CALM:
        return STRIKES_IN_CALM
    kinds = ((_WITH_BAD_DRIVES, BAD_DRIVES), (_WITH_ENCLOSURES, ENCLOSURES), (_WITH_HARSH, HARSH))
    return (*STRIKES, *(name for chance, names in kinds if dice.random() < chance for name in names))
