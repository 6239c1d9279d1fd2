"""What holds for the whole suite."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.huge_pages import huge_pages  # noqa: F401 - a fixture

# A shell without job control starts what it puts in the background with SIGINT ignored. Every process that a
# test starts would inherit that, and not stop when the test presses Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start some hundreds of processes. Where bytecode is not to be written, each would compile all of
# Ostraca for itself, which takes it half a second; so they keep it where it is in nobody's way.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(sys.prefix) / "bytecode"))

# NumPy starts a thread for each core to multiply matrices with, and each looks for work for a while. Nothing
# here multiplies matrices but the demo's model, which has threads of its own.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes says something of the machine and what else it does, not of what is tested. Every
# run draws other examples, so that few in each are many over time; the profile "thorough" draws many.
if importlib.util.find_spec("hypothesis"):  # not where vLLM runs
    from hypothesis import settings

    settings.register_profile("thorough", deadline=None, max_examples=1000)
    settings.register_profile("ostraca", deadline=None, max_examples=30)
    settings.load_profile("ostraca")

_ROOT = Path(__file__).parent
_LONG = (
    "scenarios/pod",
    "scenarios/fabric",
    "benchmarks",
    "scenarios/soak_pod",
    "simulation",
    "demo",
    "docs",
    "fabric/membership",
    "scenarios/soak_flash",
)
"""Folders with the longest tests. They start first, so that no long test runs alone at the end."""


@pytest.fixture(autouse=True)
def levels_of_logs() -> Iterator[None]:
    """Have a command that a test runs in this process set what is logged for that test alone."""
    names = (
        "ostraca",
        "ostraca_admin",
        "ostraca_cli",
        "ostraca_dpu_agent",
        "ostraca_enclosure",
        "ostraca_fabric",
    )
    ours = [logging.getLogger(name) for name in names]
    levels = [each.level for each in ours]
    yield
    for each, level in zip(ours, levels, strict=True):
        each.setLevel(level)


def pytest_collection_finish() -> None:
    """Have the collector leave alone what all tests are made of: simulations have it look at everything."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have what takes longest begin first where several processes share the tests (`make test`)."""
    if all(item.path.is_relative_to(_ROOT) for item in items):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return next(
        (turn for turn, folder in enumerate(_LONG) if item.path.is_relative_to(_ROOT / folder)), len(_LONG)
    )
