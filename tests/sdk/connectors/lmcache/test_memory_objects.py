"""Memory of LMCache's objects, with objects of the same attributes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from ostraca.connectors.lmcache.memory_objects import ObjectReader, layout_of
from ostraca.connectors.lmcache.objects import ObjectLayout
from ostraca.connectors.lmcache.settings import LmcacheSettings

HALF = np.dtype(np.float16)


def memory_object(memory: bytearray, **metadata: object) -> SimpleNamespace:
    plain = {"shape": (2, 3), "dtype": HALF, "shapes": None, "dtypes": None}
    return SimpleNamespace(byte_array=memoryview(memory), metadata=SimpleNamespace(**(plain | metadata)))


def test_the_memory_of_an_object_is_read_without_a_copy() -> None:
    memory = bytearray(12)
    found = ObjectReader().read(memory_object(memory))
    assert found is not None
    assert found.layout == layout_of([(2, 3)], [HALF]) == ObjectLayout(12, "[([2, 3], 'float16')]")
    found.memory[:] = 7
    assert memory == bytes([7] * 12)


def test_each_tensor_of_an_object_is_in_the_layout() -> None:
    byte = np.dtype(np.uint8)
    found = ObjectReader().read(memory_object(bytearray(17), shapes=[(2, 3), (5,)], dtypes=[HALF, byte]))
    assert found is not None
    assert found.layout == layout_of([(2, 3), (5,)], [HALF, byte])
    assert found.layout.size_bytes == 17


def test_the_first_object_without_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reader = ObjectReader()
    with caplog.at_level(logging.WARNING, LmcacheSettings.LOGGER):
        assert reader.read(SimpleNamespace()) is None
        assert reader.read(SimpleNamespace()) is None
    assert caplog.text.count("objects of SimpleNamespace are neither stored nor loaded") == 1
