"""A worker's end over NIXL by itself: what it makes ready for its next agent, and when it forks."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.transport_contract import ARENA, CHUNK

from ostraca_fabric.adapters import nixl_runtime
from ostraca_fabric.adapters.nixl_arena import NixlArenaEnd
from ostraca_fabric.adapters.nixl_runtime import NixlAgent
from ostraca_fabric.errors import TransportError
from ostraca_fabric.memory import HugeMemory
from ostraca_fabric.slots import SlotPool

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(nixl_runtime.package() is None, reason="NIXL is not installed"),
]


@pytest.fixture
def end() -> Iterator[NixlArenaEnd]:
    memory = HugeMemory(ARENA, prefault=False)
    end = NixlArenaEnd(memory, SlotPool(ARENA, CHUNK))
    yield end
    end.close()
    memory.close()


FEW = 5
"""A NIXL agent opens ten files; what else goes on in this process may open one or two meanwhile."""


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_was_prepared_takes_over_where_no_more_could_be_made(
    end: NixlArenaEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = end.offer()
    end.prepare_renewal()
    assert end.offer() == first
    with monkeypatch.context() as without_nixl:
        without_nixl.setattr(nixl_runtime, "PACKAGES", ("no_nixl",))
        end.renew()
        second = end.offer()
        end.prepare_renewal()  # in vain, and without a word
        with pytest.raises(TransportError, match="not installed"):
            end.renew()
    end.renew()
    assert len({first.metadata, second.metadata, end.offer().metadata}) == 3


def test_closing_an_end_lets_what_was_prepared_go_and_makes_no_more(end: NixlArenaEnd) -> None:
    before = open_files()
    end.prepare_renewal()
    assert open_files() > before
    end.close()
    assert open_files() < before
    end.prepare_renewal()
    end.renew()
    assert open_files() < before


def test_a_successor_takes_what_was_prepared_and_goes_on_when_the_end_before_is_cut_off(
    end: NixlArenaEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    end.prepare_renewal()
    prepared = open_files()
    with monkeypatch.context() as nothing_made:
        nothing_made.delattr(NixlArenaEnd, "_made")
        second = end.successor()
    assert open_files() < prepared + FEW
    offers = {end.offer().metadata, second.offer().metadata}
    end.cut_off()
    assert (cut_off := open_files()) < prepared
    end.prepare_renewal()
    assert open_files() < cut_off + FEW
    for each in (end, second):
        each.progress()
    third = second.successor()
    assert len({*offers, third.offer().metadata}) == 3
    for each in (second, third):
        each.cut_off()
    assert open_files() < cut_off


def test_a_process_forks_when_no_agent_is_half_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX's locks would be held in the child for ever, by a thread that is not there."""
    api = importlib.import_module(f"{nixl_runtime.package()}._api")
    make = api.nixl_agent
    is_begun, is_forking, is_made = threading.Event(), threading.Event(), threading.Event()

    def make_while_forking(*arguments: Any) -> Any:
        is_begun.set()
        assert is_forking.wait(10)
        agent = make(*arguments)
        is_made.set()
        return agent

    monkeypatch.setattr(api, "nixl_agent", make_while_forking)
    thread = threading.Thread(target=NixlAgent, args=("another",))
    thread.start()
    assert is_begun.wait(10)
    os.register_at_fork(before=is_forking.set)
    child = os.fork()
    if not child:
        os._exit(0 if is_made.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
