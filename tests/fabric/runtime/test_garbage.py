"""Collections pass over what a server keeps, and find cycles made later. Each test has its own process."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent


def printed(program: str) -> list[str]:
    command = [sys.executable, "-c", dedent(program)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def test_collections_visit_no_present_object_and_still_free_later_cycles() -> None:
    answers = printed(
        """
        import gc, weakref
        from ostraca_fabric.runtime.garbage import keep_present_objects

        class Node:
            pass

        def cycle():
            node = Node()
            node.itself = node
            return weakref.ref(node)

        kept = [[number] for number in range(100_000)]
        before = cycle()
        keep_present_objects()
        print(before() is None, gc.get_freeze_count() > len(kept), len(gc.get_objects()) < 1000)
        print(gc.get_threshold()[0] > 700)  # Python's default
        later = cycle()
        made = [[number] for number in range(20_000)]  # enough for a collection of the youngest
        print(later() is None)
        """
    )
    assert answers == ["True"] * 5


def test_a_daemon_keeps_the_objects_of_its_start_once_it_has_started() -> None:
    answers = printed(
        """
        import asyncio, gc
        from ostraca_cli.commands.serve.signals import start_or_stop

        async def main():
            stop = asyncio.Event()
            stop.set()
            print(await start_or_stop(asyncio.sleep(60), stop), gc.get_freeze_count())
            print(await start_or_stop(asyncio.sleep(0), asyncio.Event()), gc.get_freeze_count() > 10_000)

        asyncio.run(main())
        """
    )
    assert answers == ["False", "0", "True", "True"]
