"""A worker's end over NIXL by itself: what it makes ready for its next agent, and when it forks."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.transports.transport_bench import (
    ARENA,
    CHUNK,
)

from ostraca._memory.nixl_arena import NixlArenaEnd
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl import runtime
from ostraca_fabric.nixl.runtime import NixlAgent
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(runtime.package() is None, reason="NIXL is not installed"),
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
        without_nixl.setattr(runtime, "PACKAGES", ("no_nixl",))
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
        nothing_made.delattr(NixlArenaEnd, "_register")
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
    api = importlib.import_module(f"{runtime.package()}._api")
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


def test_a_process_forked_after_the_use_of_nixl_is_refused_at_once() -> None:
    """UCX is set up in the child, but other processes don't reach it: each attempt took 2 s."""
    NixlAgent("parent")
    child = os.fork()
    if not child:
        try:
            NixlAgent("child")
        except TransportError as error:
            os._exit(0 if "start workers with spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- where there is too little room ------------------------------------------------------------------------

NO_DESCRIPTORS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os.close(held.pop())
    os.close(held.pop())
    os.close(held.pop())
"""

NO_THREADS = """
os.environ["HOME"] = "/"  # NIXL looks there for its settings
if not os.getuid():  # root has no such limit
    os.setgroups([])
    os.setresuid(61234, 61234, 61234)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
"""

NO_ADDRESS_SPACE = """
(pages,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, ((pages << 10) + (60 << 20),) * 2)
"""

MAKE = """
try:
    NixlArenaEnd(memory, SlotPool({arena}, {chunk}))
except TransportError as error:
    print(error)
"""

LOADED = """
import os, resource
import nixl_cu12._api
from ostraca._memory.nixl_arena import NixlArenaEnd
from ostraca_fabric.errors import TransportError
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.tables.slots import SlotPool
memory = HugeMemory({arena}, prefault=False)
"""


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (NO_DESCRIPTORS, r"needs \d+ free file descriptors and this process has 3 \(its limit is 64\)"),
        (NO_THREADS, r"needs 4 more threads and this process can start 0: raise"),
        (NO_ADDRESS_SPACE, r"needs 268435456 bytes of address space .*\(its limit is \d+\)"),
    ],
    ids=["descriptors", "threads", "address space"],
)
def test_too_little_room_is_an_error_and_not_the_end_of_the_process(limit: str, words: str) -> None:
    """UCX aborts a process that gets that far with so little."""
    program = LOADED.format(arena=ARENA, chunk=CHUNK) + limit + MAKE.format(arena=ARENA, chunk=CHUNK)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(f"NIXL {words}", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    "content",
    [
        "import no_such_library",
        "raise RuntimeError('built for another driver')",
        "",
        "class nixlBind: nixlRemoteDisconnectError = ValueError",
    ],
)
def test_a_version_that_can_not_be_used_is_an_error_that_names_it(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"nixl_in_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "_api.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runtime, "PACKAGES", (package,))
    with pytest.raises(TransportError, match=f"{package} can't be"):
        NixlAgent("worker")


def test_variables_of_somebody_else_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/nowhere\n")
    monkeypatch.setitem(os.environ, "UCX_LOG_LEVEL", "fatal")
    program = "from ostraca_fabric.nixl.runtime import NixlAgent\nNixlAgent('worker')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(r"(with NIXL_PLUGIN_DIR='/nowhere\n', set for this process)")


def test_another_package_is_taken_where_the_first_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"nixl_in_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "_api.py").write_text("raise OSError('libcudart.so.99: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runtime, "PACKAGES", (package, *runtime.PACKAGES))
    assert NixlAgent("worker").metadata()


def test_a_version_that_lacks_a_method_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    api = importlib.import_module(f"{runtime.package()}._api")
    monkeypatch.delattr(api.nixl_agent, "make_prepped_xfer")
    with pytest.raises(TransportError, match="lacks make_prepped_xfer: install version"):
        NixlAgent("worker")
