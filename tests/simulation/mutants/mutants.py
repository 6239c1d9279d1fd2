"""``make mutants``: mistakes made on purpose, each of which some simulation must find.

A mutant changes one thing in the running code, in a process of its own, and is then hunted: by histories of a
whole fabric, by histories of one shard, by exploration, or by a scene made for it; some of them in two ways.
A mutant that one of its hunts does not find says that this one has a blind spot; ends with 1 then.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from tests.simulation.explore.explore import explore
from tests.simulation.explore.explore_scope import Scope
from tests.simulation.fabric.history import history as fabric_history
from tests.simulation.fabric.history.drawn import STRIKES_IN_CALM
from tests.simulation.fabric.world.agent_memory import MemoryReads
from tests.simulation.fabric.world.blocks import VOLUMES
from tests.simulation.fabric.world.direct import DirectReads
from tests.simulation.fabric.world.process import Lateness
from tests.simulation.fabric.world.world import Setup
from tests.simulation.mutants import (
    direct_mistakes,
    ending_mistakes,
    mistakes,
    region_mistakes,
    sharing_mistakes,
)
from tests.simulation.shard import history as shard_history
from tests.simulation.shard import test_oracle as shard_scenes
from tests.simulation.shard.many import begin
from tests.simulation.shard.world import Setup as ShardSetup
from tests.support.simulated.drives.drive_faults import DriveFaults
from tests.support.simulated.simulated_membership import StoreFaults
from tests.support.simulated.simulated_transport import TransferFaults
from tests.support.simulated.virtual_time import VirtualLoop

Hunt = Callable[[], str]
"""Looks for a mutant; returns what was found, empty if nothing was."""

_UNFIT = ("AttributeError:", "ImportError:", "NameError:", "TypeError:")
"""How a process ends in which a mistake was planted that was made for the code as it used to be."""

_HISTORIES = 60
_RARELY = 360
"""For mistakes that need a rare coincidence: a write that lands between two looks of a successor, a reader of
two segments while one of them goes, a get under way when a connection closes."""

_STATES = 6000
FULL = Scope(puts=2, keys=1, ticks=3, claim_until=0, is_full=True)
AT_ONCE = Scope(puts=2, keys=1, ticks=0, claim_until=0)
SLOW = DriveFaults(service_s=0.002, late=0.5, late_s=4.0)
LYING = Setup(lies=0.2, strikes=("link_is_slow",))
STALLING = Setup(
    transfer_faults=TransferFaults(stalls=0.3, stall_s=20.0, late=1.0),
    strikes=("worker_is_reset",),
)
CRASHING = Setup(drive_faults=SLOW, strikes=("agent_dies",), numbers=32)
STORE_DOWN = Setup(strikes=STRIKES_IN_CALM)
EMPTIED = Setup(reach=StoreFaults(twice=0.5), strikes=("store_is_emptied", "agent_dies"))
CHANGING = Setup(enclosures=2, drives=1, strikes=("enclosure_is_added", "enclosure_is_drained"))
BAD = Setup(strikes=("agent_dies", "drive_is_ill", "drive_rots", "drive_loses_power"))
LASTING = Setup(strikes=("link_is_slow",))
PRESSED = Setup(segments=3, drives=1, numbers=256, blocks=(4, 16, 32), strikes=STRIKES_IN_CALM)
PARTED = Setup(drive_faults=SLOW, strikes=("hosts_are_parted", "agent_dies"), numbers=32)
CUT_OFF = Setup(strikes=("store_is_cut_off", "leases_are_lost", "agent_dies"), segments=6)
JUST_IN_TIME = Setup(
    drive_faults=DriveFaults(service_s=0.03, late=1.0, late_from_s=0.8, late_s=1.0),
    transfer_faults=TransferFaults(stalls=0.2, stall_s=1.0),
    lateness=Lateness(hold_s=0.5, pause_max_s=8.0, late_write_s=18.0, adopt_every_s=60.0),
    strikes=("store_is_cut_off", "link_is_slow", "agent_stops_before_it_writes", "hosts_are_parted"),
    segments=3,
)
SLOWLY_ASKED = replace(
    JUST_IN_TIME,
    transfer_faults=TransferFaults(stalls=0.5, stall_s=0.5),
    lateness=replace(JUST_IN_TIME.lateness, hold_s=0.3),
    strikes=("link_is_slow",),
)
LATE = Setup(
    drive_faults=DriveFaults(service_s=0.03, late=1.0, late_from_s=13.0, late_s=25.0),
    lateness=Lateness(hold_s=0.5, pause_max_s=8.0, late_write_s=30.0),
    strikes=("agent_dies",),
)
LATE_AND_PRESSED = replace(
    LATE,
    drive_faults=replace(LATE.drive_faults, late_from_s=1.0),
    segments=3,
    drives=1,
    numbers=256,
    blocks=(4, 16, 32),
)
ADOPTED = replace(
    LATE,
    hosts=3,
    drive_faults=DriveFaults(service_s=0.1, late=1.0, late_from_s=5.5, late_s=6.5),
    lateness=replace(LATE.lateness, late_write_s=60.0, adopt_every_s=0.5),
    segments=6,
    numbers=96,
    blocks=(2, 4, 8),
)
PUT_AGAIN = replace(ADOPTED, numbers=6, blocks=(1, 2))
SLOWLY_READ = replace(PRESSED, drive_faults=DriveFaults(service_s=0.05))
READ_DIRECTLY = Setup(
    has_cache=False,
    drive_faults=DriveFaults(service_s=0.005),
    direct=DirectReads(failures=0.1, retry_s=0.2),
    strikes=("link_is_slow",),
)
READ_FROM_STRAYS = replace(READ_DIRECTLY, direct=DirectReads(strays=0.5))
READ_LATE = replace(
    READ_DIRECTLY, direct=DirectReads(failures=0.05, hangs=0.1, hang_s=10.0, silent_s=0.3, retry_s=0.2)
)
READ_UNDER_PRESSURE = replace(
    SLOWLY_READ, has_cache=False, direct=DirectReads(hangs=1.0, hang_s=2.0, silent_s=5.0)
)
READ_AND_CACHED = Setup(
    hosts=1,
    numbers=256,
    segments=6,
    blocks=(16, 32),
    drive_faults=DriveFaults(service_s=0.01),
    transfer_faults=TransferFaults(stalls=0.5, stall_s=1.0),
    direct=DirectReads(),
    strikes=("link_is_slow",),
)
READ_FROM_MEMORY = Setup(
    hosts=1,
    numbers=36,
    segments=6,
    blocks=(2, 4, 8, 16),
    has_small_cache=True,
    memory=MemoryReads(pauses=0.5, tears=0.5),
    strikes=("store_goes_down",),
)
GROWING = Setup(enclosures=2, strikes=("agent_dies", "link_is_slow"))
SHARED = Setup(volumes=VOLUMES, strikes=("link_is_slow",))
CROWDED = Setup(
    hosts=1,
    volumes=VOLUMES,
    numbers=384,
    blocks=(16, 32),
    drive_faults=DriveFaults(service_s=0.1),
    has_cache=False,
    requests_max=4,
    strikes=("link_is_slow",),
)
CHAINED = Setup(chained=0.5, strikes=("link_is_slow",))
IN_PLACE = Setup(hosts=1, inline=1.0, regions=0.7, numbers=256, blocks=(8, 16), strikes=("link_is_narrow",))
PUSHED = Setup(
    hosts=1,
    pushed=0.7,
    numbers=128,
    blocks=(4, 8, 16),
    transfer_faults=TransferFaults(stalls=0.3, stall_s=2.0),
    strikes=("link_is_slow",),
)
ENDING = Setup(hosts=3, strikes=("agent_ends",))
ENDING_SLOWLY = replace(ENDING, transfer_faults=TransferFaults(stalls=0.5, stall_s=1.0))


def _last_line(found: Exception) -> str:
    """Return what was found, in a line. What only says that a mistake does not fit the code is no find."""
    line = str(found).splitlines()[-1]
    if line.startswith(_UNFIT):
        message = f"the mutant itself is wrong: {line}"
        raise TypeError(message) from found
    return line


def in_fabric(setup: Setup | None = None, histories: int = _HISTORIES) -> Hunt:
    """Play histories of a fabric."""

    def hunt() -> str:
        for seed in range(histories):
            try:
                fabric_history.play(seed, setup=setup)
            except fabric_history.FailedHistoryError as failed:
                if not isinstance(failed.__cause__, AssertionError):
                    raise  # the mutant itself is wrong
                return f"history {seed} of a fabric: {_last_line(failed)}"
        return ""

    return hunt


def in_shard(setup: ShardSetup, histories: int = _HISTORIES) -> Hunt:
    """Play histories of a shard."""

    def hunt() -> str:
        for seed in range(histories):
            try:
                shard_history.play(seed, setup=setup)
            except AssertionError as violation:
                return f"history {seed} of a shard: {_last_line(violation)}"
        return ""

    return hunt


def in_scene(scene: Callable[[], Awaitable[object]]) -> Hunt:
    """Play a scene that was made for it."""

    def hunt() -> str:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(_awaited(scene()))
        except AssertionError as violation:
            return f"a scene of a shard: {violation}"
        finally:
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()
        return ""

    return hunt


def in_exploration(scope: Scope) -> Hunt:
    """Go through every order of events around a change of owner."""

    def hunt() -> str:
        explored = explore(scope, states_max=_STATES, checks_every=1 << 30)
        return f"exploration, after {explored.states} states: {explored.wrong}" if explored.wrong else ""

    return hunt


async def _awaited(scene: Awaitable[object]) -> None:
    await scene


@dataclass(frozen=True)
class Mutant:
    """A mistake: what is wrong, what makes it, and who finds it, each by itself."""

    name: str
    plant: Callable[[], None]
    hunts: tuple[Hunt, ...]


_LASTING, _SMALL = shard_scenes.LASTING, shard_scenes.SMALL
_FAILING = replace(_SMALL, faults=replace(shard_scenes.SLOW, write_errors=0.1, late_failures=1.0, late_s=4.0))
_READ_WRONG = replace(_LASTING, faults=replace(shard_scenes.SLOW, rot_on_read=0.05))

MUTANTS = (
    Mutant(
        "no tag is checked at the reader",
        mistakes.no_tag_at_the_reader,
        (in_fabric(LYING), in_fabric(READ_FROM_STRAYS)),
    ),
    Mutant(
        "a block is a HIT because the agent says so", mistakes.hits_on_the_agents_word, (in_fabric(LYING),)
    ),
    Mutant("tags are made by the agent", mistakes.tags_made_by_the_agent, (in_fabric(LYING),)),
    Mutant(
        "slots are used again without quarantine",
        mistakes.slots_used_again_without_quarantine,
        (in_fabric(STALLING),),
    ),
    Mutant(
        "a lost connection settles its slots",
        mistakes.a_lost_connection_settles_its_slots,
        (in_fabric(STALLING),),
    ),
    Mutant(
        "the past is settled before it is", mistakes.the_past_is_settled_before_it_is, (in_fabric(STALLING),)
    ),
    Mutant("an unowned block is found", mistakes.an_unowned_block_is_found, (in_fabric(CRASHING),)),
    Mutant("every block is found", mistakes.every_block_is_found, (in_fabric(LASTING),)),
    Mutant("no block is found", mistakes.no_block_is_found, (in_fabric(STORE_DOWN),)),
    Mutant("promises are broken", mistakes.promises_are_broken, (in_fabric(PRESSED),)),
    Mutant(
        "only the first segment is pinned",
        mistakes.only_the_first_segment_is_pinned,
        (in_fabric(SLOWLY_READ, _RARELY), in_scene(shard_scenes.read_from_two_segments)),
    ),
    Mutant(
        "no word of a commit is good word", mistakes.no_word_of_a_commit_is_good_word, (in_fabric(PARTED),)
    ),
    Mutant("what is being written exists", mistakes.what_is_being_written_exists, (in_fabric(CRASHING),)),
    Mutant(
        "a put is committed before it is on flash",
        mistakes.committed_before_it_is_on_flash,
        (in_fabric(CRASHING), in_shard(_LASTING)),
    ),
    Mutant("what exists is taken for new", mistakes.what_exists_is_taken_for_new, (in_fabric(CRASHING),)),
    Mutant(
        "a commit under an ended epoch counts",
        mistakes.a_commit_under_an_ended_epoch_counts,
        (in_scene(shard_scenes.commit_to_a_successor),),
    ),
    Mutant(
        "the last commit wins, not the first",
        mistakes.the_last_commit_wins,
        (in_fabric(LASTING), in_exploration(FULL)),
    ),
    Mutant(
        "pins are ignored",
        mistakes.pins_are_ignored,
        (in_fabric(SLOWLY_READ), in_scene(shard_scenes.read_while_others_put)),
    ),
    Mutant("a report of damage is trusted", mistakes.stale_damage_is_trusted, (in_shard(_READ_WRONG),)),
    Mutant(
        "a failed write is not waited for", mistakes.a_failed_write_is_not_waited_for, (in_shard(_FAILING),)
    ),
    Mutant(
        "a late write is not waited for before space is used again",
        mistakes.a_late_write_is_not_waited_for_before_space_is_used_again,
        (in_fabric(LATE_AND_PRESSED, _RARELY),),
    ),
    Mutant(
        "a late write is not waited for before its grant is retired",
        mistakes.a_late_write_is_not_waited_for_before_its_grant_is_retired,
        (in_fabric(LATE),),
    ),
    Mutant(
        "a successor opens inside an unretired grant",
        mistakes.a_successor_opens_inside_an_unretired_grant,
        (in_exploration(FULL),),
    ),
    Mutant(
        "a successor opens inside an unretired grant, and the store lets it",
        mistakes.a_successor_is_granted_what_an_unretired_grant_holds,
        (in_fabric(LATE_AND_PRESSED),),
    ),
    Mutant(
        "nothing is adopted",
        mistakes.nothing_is_adopted,
        (in_fabric(JUST_IN_TIME), in_exploration(FULL)),
    ),
    Mutant(
        "what was adopted is let go once it was read",
        mistakes.what_was_adopted_is_let_go_once_it_was_read,
        (in_fabric(ADOPTED, _RARELY),),
    ),
    Mutant(
        "an own entry does not win",
        mistakes.an_own_entry_does_not_win,
        (in_fabric(PUT_AGAIN, _RARELY), in_exploration(AT_ONCE)),
    ),
    Mutant(
        "a commit after its reservation counts",
        mistakes.a_commit_after_its_reservation_counts,
        (in_fabric(JUST_IN_TIME), in_exploration(FULL)),
    ),
    Mutant(
        "the fence is ignored",
        mistakes.the_fence_is_ignored,
        (in_fabric(STORE_DOWN), in_exploration(FULL)),
    ),
    Mutant("look-ups end with the grant", mistakes.lookups_end_with_the_grant, (in_fabric(STORE_DOWN),)),
    Mutant(
        "an owner writes without asking",
        mistakes.an_owner_writes_without_asking,
        (in_fabric(STORE_DOWN),),
    ),
    Mutant(
        "an own claim is a fence for good",
        mistakes.an_own_claim_is_a_fence_for_good,
        (in_fabric(EMPTIED),),
    ),
    Mutant(
        "a grant counts before it is recorded",
        mistakes.a_grant_counts_before_it_is_recorded,
        (in_fabric(CUT_OFF, _RARELY),),
    ),
    Mutant(
        "nothing is adopted in the end",
        mistakes.nothing_is_adopted_in_the_end,
        (in_fabric(JUST_IN_TIME),),
    ),
    Mutant(
        "a reservation counts from its answer",
        mistakes.a_reservation_counts_from_its_answer,
        (in_fabric(SLOWLY_ASKED),),
    ),
    Mutant(
        "a reservation has no end for its writer",
        mistakes.a_reservation_has_no_end_for_its_writer,
        (in_fabric(JUST_IN_TIME),),
    ),
    Mutant(
        "the fence counts from the answer", mistakes.the_fence_counts_from_the_answer, (in_fabric(LASTING),)
    ),
    Mutant(
        "a claim stands whatever the store says",
        mistakes.a_claim_stands_whatever_the_store_says,
        (in_fabric(CUT_OFF),),
    ),
    Mutant("an epoch is retired at once", mistakes.an_epoch_is_retired_at_once, (in_fabric(CHANGING),)),
    Mutant(
        "only the current epoch is asked", mistakes.only_the_current_epoch_is_asked, (in_fabric(CHANGING),)
    ),
    Mutant(
        "a write that failed is taken for good",
        mistakes.a_write_that_failed_is_taken_for_good,
        (in_fabric(BAD),),
    ),
    Mutant(
        "a shard with a bad page is not read",
        mistakes.a_shard_with_a_bad_page_is_not_read,
        (in_fabric(BAD, histories=300),),
    ),
    Mutant(
        "inline blocks are mixed up, and unchecked",
        mistakes.inline_blocks_are_mixed_up_unchecked,
        (in_fabric(replace(LASTING, inline=1.0)),),
    ),
    Mutant(
        "volumes are known by their names alone",
        sharing_mistakes.volumes_are_known_by_their_names_alone,
        (in_fabric(SHARED),),
    ),
    Mutant(
        "keys say nothing of the tenant",
        sharing_mistakes.keys_say_nothing_of_the_tenant,
        (in_fabric(SHARED),),
    ),
    Mutant(
        "keys are remembered by their hashes alone",
        sharing_mistakes.keys_are_remembered_by_their_hashes_alone,
        (in_fabric(SHARED),),
    ),
    Mutant(
        "neither keys nor tags of gets tell tenants apart",
        sharing_mistakes.neither_keys_nor_tags_of_gets_tell_tenants_apart,
        (in_fabric(replace(SHARED, expects_all=False)),),
    ),
    Mutant(
        "a part of a chain is placed by its own beginning",
        sharing_mistakes.a_part_of_a_chain_is_placed_by_its_own_beginning,
        (in_fabric(CHAINED),),
    ),
    Mutant(
        "a prefix goes on behind a hole",
        sharing_mistakes.a_prefix_goes_on_behind_a_hole,
        (in_fabric(CHAINED),),
    ),
    Mutant(
        "more requests are served than may be",
        sharing_mistakes.more_requests_are_served_than_may_be,
        (in_fabric(CROWDED),),
    ),
    Mutant("puts take all of staging", sharing_mistakes.puts_take_all_of_staging, (in_fabric(CROWDED),)),
    Mutant(
        "one worker takes all of staging",
        sharing_mistakes.one_worker_takes_all_of_staging,
        (in_fabric(CROWDED),),
    ),
    Mutant(
        "a shard that was left is answered for no longer",
        ending_mistakes.a_shard_that_was_left_is_answered_for_no_longer,
        (in_fabric(ENDING),),
    ),
    Mutant(
        "who leaves tells nobody",
        ending_mistakes.who_leaves_tells_nobody,
        (in_fabric(ENDING_SLOWLY, _RARELY),),
    ),
    Mutant(
        "who leaves waits for no transfer",
        ending_mistakes.who_leaves_waits_for_no_transfer,
        (in_fabric(ENDING_SLOWLY),),
    ),
    Mutant(
        "slots come back under an own read",
        direct_mistakes.slots_come_back_under_an_own_read,
        (in_fabric(READ_LATE),),
    ),
    Mutant(
        "slots of lost reads come back",
        direct_mistakes.slots_of_lost_reads_come_back,
        (in_fabric(READ_LATE),),
    ),
    Mutant(
        "slots under own reads never come back",
        direct_mistakes.slots_under_own_reads_never_come_back,
        (in_fabric(READ_LATE),),
    ),
    Mutant(
        "blocks read here count as checked",
        direct_mistakes.blocks_read_here_count_as_checked,
        (in_fabric(READ_FROM_STRAYS),),
    ),
    Mutant(
        "what is lost is asked for again",
        direct_mistakes.what_is_lost_is_asked_for_again,
        (in_fabric(READ_LATE),),
    ),
    Mutant(
        "what failed is left to nobody",
        direct_mistakes.what_failed_is_left_to_nobody,
        (in_fabric(READ_DIRECTLY), in_fabric(READ_FROM_MEMORY)),
    ),
    Mutant(
        "the agent delivers what it has offered",
        direct_mistakes.the_agent_delivers_what_it_has_offered,
        (in_fabric(READ_DIRECTLY),),
    ),
    Mutant(
        "what is offered is not pinned",
        direct_mistakes.what_is_offered_is_not_pinned,
        (in_fabric(READ_UNDER_PRESSURE, _RARELY),),
    ),
    Mutant(
        "pins end with the answer",
        direct_mistakes.pins_end_with_the_answer,
        (in_fabric(READ_UNDER_PRESSURE, _RARELY),),
    ),
    Mutant(
        "a get ends before its own reads",
        direct_mistakes.a_get_ends_before_its_own_reads,
        (in_fabric(READ_DIRECTLY),),
    ),
    Mutant("a get has two offers", direct_mistakes.a_get_has_two_offers, (in_fabric(READ_AND_CACHED),)),
    Mutant(
        "who asks again is offered extents",
        direct_mistakes.who_asks_again_is_offered_extents,
        (in_fabric(READ_DIRECTLY),),
    ),
    Mutant(
        "reads end by a report alone",
        direct_mistakes.reads_end_by_a_report_alone,
        (in_fabric(READ_LATE),),
    ),
    Mutant(
        "own reads count as requests for good",
        direct_mistakes.own_reads_count_as_requests_for_good,
        (in_fabric(READ_DIRECTLY),),
    ),
    Mutant(
        "a frame lands in rows to its end",
        region_mistakes.a_frame_lands_in_rows_to_its_end,
        (in_fabric(IN_PLACE),),
    ),
    Mutant(
        "rows are read until they are sent",
        region_mistakes.rows_are_read_until_they_are_sent,
        (in_fabric(IN_PLACE),),
    ),
    Mutant("slots name rows for good", region_mistakes.slots_name_rows_for_good, (in_fabric(IN_PLACE),)),
    Mutant(
        "rows take blocks in any order",
        region_mistakes.rows_take_blocks_in_any_order,
        (in_fabric(IN_PLACE),),
    ),
    Mutant(
        "rows are free at the end of their get",
        region_mistakes.rows_are_free_at_the_end_of_their_get,
        (in_fabric(PUSHED),),
    ),
    Mutant(
        "rows of an answered get are free",
        region_mistakes.rows_of_an_answered_get_are_free,
        (in_fabric(PUSHED),),
    ),
    Mutant(
        "an answer names no moving blocks",
        region_mistakes.an_answer_names_no_moving_blocks,
        (in_fabric(PUSHED),),
    ),
    Mutant(
        "withheld rows never come back",
        region_mistakes.withheld_rows_never_come_back,
        (in_fabric(PUSHED),),
    ),
    Mutant(
        "blocks read from memory are not verified",
        direct_mistakes.no_copied_block_is_verified,
        (in_fabric(READ_FROM_MEMORY),),
    ),
    Mutant(
        "who asks again is left to read memory",
        direct_mistakes.who_asks_again_is_offered_memory,
        (in_fabric(READ_FROM_MEMORY),),
    ),
    Mutant(
        "blocks to read from memory are mixed up",
        direct_mistakes.blocks_in_memory_are_mixed_up,
        (in_fabric(READ_FROM_MEMORY),),
    ),
    Mutant(
        "the agent delivers what is read from its memory",
        direct_mistakes.the_agent_delivers_what_it_leaves_in_memory,
        (in_fabric(READ_FROM_MEMORY),),
    ),
    Mutant("blocks are placed by revision", mistakes.blocks_are_placed_by_revision, (in_fabric(GROWING),)),
)


def hunted(name: str) -> tuple[list[str], float]:
    """Plant a mutant in this process and hunt it; return what each hunt found, and how long all took."""
    began_s = time.monotonic()
    mutant = next(each for each in MUTANTS if each.name == name)
    mutant.plant()
    return [hunt() for hunt in mutant.hunts], time.monotonic() - began_s


def all_hunted(names: list[str], jobs: int) -> Iterator[tuple[str, list[str], float]]:
    """Hunt each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=begin, max_tasks_per_child=1) as pool:
        hunts = {pool.submit(hunted, name): name for name in names}
        for done in as_completed(hunts):
            yield hunts[done], *done.result()


def main() -> int:
    """Hunt all mutants, or those whose names hold a word."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants.mutants", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="hunt only mutants whose names hold it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    chosen = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS if chosen.word in mutant.name]
    lives = []
    for name, found, took_s in all_hunted(names, chosen.jobs):
        said = "".join(f"\n    {each or 'NOT FOUND'}" for each in found)
        print(f"{name} ({took_s:.0f} s){said}", flush=True)
        if not all(found):
            lives.append(name)
    print(f"{len(names) - len(lives)} of {len(names)} mutants were found")
    return 1 if lives else 0


if __name__ == "__main__":
    sys.exit(main())
