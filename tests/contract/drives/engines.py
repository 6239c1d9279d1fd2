"""Engines of open drives, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.simulated.drives.file_devices import FileReferenceEngine

from ostraca_fabric.drives.file_drive import LoopIoEngine
from ostraca_fabric.drives.io_engine import DriveEngine, FlashIoSettings

ENGINES = ("io_uring", "threads", "reference")
PATIENT_ENGINES = ("io_uring", "reference")
"""Engines that read pipes."""


def new_engine(name: str, settings: FlashIoSettings | None = None) -> DriveEngine:
    """Return an engine to close. Skips the test if the kernel refuses the engine."""
    settings = settings or FlashIoSettings()
    if name == "reference":
        return FileReferenceEngine(settings)
    made = LoopIoEngine(replace(settings, io_uring=name == "io_uring"))
    if made.mode != name:
        made.close()
        pytest.skip("this kernel or container refuses io_uring")
    return made
