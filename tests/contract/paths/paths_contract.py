"""What every host's paths must do. An adapter's test inherits this and gives the enclosure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import pytest

from ostraca_fabric.model.target import Controller, Target
from ostraca_fabric.ports.paths import PathError, Paths, PathState, Stage

NQN = "nqn.2025-01.io.ostraca:shelf-1"
OTHER_NQN = "nqn.2025-01.io.ostraca:shelf-2"
HOST = "nqn.2025-01.io.ostraca:host-1"
OTHER_HOST = "nqn.2025-01.io.ostraca:host-2"
SECRET = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
OTHER_SECRET = "DHHC-1:00:XTmwWDpHKb4BhYDrHZYiTYwC5mnK7ajlPZVVUbxuRwRGNyhK:"
NGUIDS = ("0f" * 16, "a1" * 16)
DRIVE_BYTES = 8 << 20


class Shelf(Protocol):
    """An enclosure that exports drives of ``NGUIDS`` as ``NQN``, each of ``DRIVE_BYTES``."""

    @property
    def controllers(self) -> tuple[Controller, Controller]:
        """Two paths to it; the second does not answer until ``add_path``."""

    def paths(self, host: str) -> Paths:
        """Return a host's paths, none connected yet."""

    def allow(self, hosts: Mapping[str, str]) -> None:
        """Let in these hosts only, by NQN, with their secrets; none: every host."""

    def leave(self) -> None:
        """Answer no more, as when its power is gone."""

    def come_back(self) -> None:
        """Answer again, and let what was connected find that out."""

    def add_path(self) -> None:
        """Have its second controller answer."""


def target(shelf: Shelf, nqn: str = NQN, *, is_one: bool = True) -> Target:
    return Target(nqn, shelf.controllers[:1] if is_one else shelf.controllers)


def live(states: tuple[PathState, ...]) -> list[bool]:
    return [each.is_live for each in states]


class PathsContract:
    @pytest.fixture
    def shelf(self) -> Shelf:
        raise NotImplementedError

    async def test_a_host_that_connects_is_told_its_drives_by_nguid(self, shelf: Shelf) -> None:
        paths = shelf.paths(HOST)
        assert paths.host == HOST
        found = await paths.connect(target(shelf), "")
        assert [(each.nguid, each.size_bytes) for each in found] == [(nguid, DRIVE_BYTES) for nguid in NGUIDS]
        assert all(each.lba_bytes in (512, 4096) for each in found)
        assert len({each.device for each in found}) == len(NGUIDS)
        assert await paths.namespaces(target(shelf)) == found
        states = await paths.states(target(shelf))
        assert [each.controller for each in states] == list(shelf.controllers[:1])
        assert live(states) == [True]

    async def test_connecting_again_changes_nothing(self, shelf: Shelf) -> None:
        paths = shelf.paths(HOST)
        found = await paths.connect(target(shelf), "")
        states = await paths.states(target(shelf))
        assert await paths.connect(target(shelf), "") == found
        assert await paths.states(target(shelf)) == states

    async def test_what_is_not_connected_has_no_drives_and_is_not_live_and_says_so(
        self, shelf: Shelf
    ) -> None:
        paths = shelf.paths(HOST)
        assert await paths.namespaces(target(shelf)) == ()
        states = await paths.states(target(shelf))
        assert [(each.is_live, each.detail) for each in states] == [(False, "not connected")]
        await paths.disconnect(target(shelf))

    async def test_one_path_that_answers_is_enough_and_the_other_is_tried_again(self, shelf: Shelf) -> None:
        paths, both = shelf.paths(HOST), target(shelf, is_one=False)
        found = await paths.connect(both, "")
        states = await paths.states(both)
        assert [each.controller for each in states] == list(shelf.controllers)
        assert live(states) == [True, False]
        assert str(shelf.controllers[1]) in states[1].detail
        shelf.add_path()
        assert [each.nguid for each in await paths.connect(both, "")] == [each.nguid for each in found]
        assert live(await paths.states(both)) == [True, True]

    async def test_where_nothing_answers_an_enclosure_is_not_reached(self, shelf: Shelf) -> None:
        shelf.leave()
        paths = shelf.paths(HOST)
        with pytest.raises(PathError, match=re.escape(str(shelf.controllers[0]))) as caught:
            await paths.connect(target(shelf), "")
        assert caught.value.stage is Stage.REACH
        assert await paths.namespaces(target(shelf)) == ()

    async def test_a_host_that_is_not_on_the_list_is_told_to_be_put_there(self, shelf: Shelf) -> None:
        shelf.allow({OTHER_HOST: ""})
        paths = shelf.paths(HOST)
        with pytest.raises(PathError, match=f"rejects this host: add {HOST} to the hosts") as caught:
            await paths.connect(target(shelf), "")
        assert caught.value.stage is Stage.AUTHENTICATE
        assert live(await paths.states(target(shelf))) == [False]
        shelf.allow({OTHER_HOST: "", HOST: ""})
        assert len(await paths.connect(target(shelf), "")) == len(NGUIDS)

    @pytest.mark.parametrize("shown", ["", OTHER_SECRET], ids=["none", "another"])
    async def test_a_host_needs_its_secret_and_no_message_shows_one(self, shelf: Shelf, shown: str) -> None:
        shelf.allow({HOST: SECRET})
        paths = shelf.paths(HOST)
        with pytest.raises(PathError, match="secret") as caught:
            await paths.connect(target(shelf), shown)
        assert caught.value.stage is Stage.AUTHENTICATE
        details = [each.detail for each in await paths.states(target(shelf))]
        assert not any("DHHC" in text for text in (str(caught.value), *details))
        assert len(await paths.connect(target(shelf), SECRET)) == len(NGUIDS)

    async def test_another_enclosure_at_that_controller_is_not_the_one_that_is_meant(
        self, shelf: Shelf
    ) -> None:
        paths = shelf.paths(HOST)
        with pytest.raises(PathError, match=OTHER_NQN) as caught:
            await paths.connect(target(shelf, OTHER_NQN), "")
        assert caught.value.stage is Stage.IDENTIFY
        assert await paths.namespaces(target(shelf, OTHER_NQN)) == ()

    async def test_of_several_refusals_the_one_that_came_furthest_is_told(self, shelf: Shelf) -> None:
        shelf.allow({OTHER_HOST: ""})
        with pytest.raises(PathError, match=re.escape(str(shelf.controllers[1]))) as caught:
            await shelf.paths(HOST).connect(target(shelf, is_one=False), "")
        assert caught.value.stage is Stage.AUTHENTICATE

    async def test_a_path_that_is_lost_is_not_live_and_comes_back(self, shelf: Shelf) -> None:
        paths = shelf.paths(HOST)
        found = await paths.connect(target(shelf), "")
        shelf.leave()
        assert live(await paths.states(target(shelf))) == [False]
        assert await paths.namespaces(target(shelf)) == ()
        with pytest.raises(PathError, match=re.escape(str(shelf.controllers[0]))) as caught:
            await paths.connect(target(shelf), "")
        assert caught.value.stage is Stage.REACH
        shelf.come_back()
        assert [each.nguid for each in await paths.connect(target(shelf), "")] == [
            each.nguid for each in found
        ]
        assert live(await paths.states(target(shelf))) == [True]

    async def test_a_host_that_is_taken_off_the_list_keeps_what_it_has(self, shelf: Shelf) -> None:
        paths = shelf.paths(HOST)
        found = await paths.connect(target(shelf), "")
        shelf.allow({OTHER_HOST: ""})
        assert await paths.connect(target(shelf), "") == found
        assert live(await paths.states(target(shelf))) == [True]

    async def test_after_a_disconnect_nothing_is_there_until_it_connects_again(self, shelf: Shelf) -> None:
        paths = shelf.paths(HOST)
        found = await paths.connect(target(shelf), "")
        await paths.disconnect(target(shelf))
        assert await paths.namespaces(target(shelf)) == ()
        assert live(await paths.states(target(shelf))) == [False]
        assert [each.nguid for each in await paths.connect(target(shelf), "")] == [
            each.nguid for each in found
        ]
