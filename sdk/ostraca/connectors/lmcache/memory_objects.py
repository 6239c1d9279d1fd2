"""Memory and layout of LMCache's objects, read without an import of LMCache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from ostraca.connectors.lmcache.objects import L2Object, ObjectLayout
from ostraca.connectors.lmcache.settings import LmcacheSettings

log = logging.getLogger(LmcacheSettings.LOGGER)


class ObjectReader:
    """Reader of LMCache's memory objects. Logs the first problem."""

    def __init__(self) -> None:
        self._has_logged_problem = False

    def read(self, each: Any) -> L2Object | None:  # noqa: ANN401 (LMCache's classes have no types here)
        """Return an object's memory; None if the host can't address the memory."""
        try:
            memory = np.frombuffer(each.byte_array, np.uint8)
            metadata = each.metadata
            shapes = metadata.shapes or [metadata.shape]
            layout = layout_of(shapes, metadata.dtypes or [metadata.dtype], size_bytes=len(memory))
        except Exception as error:  # noqa: BLE001 (LMCache's threads end with an error)
            if not self._has_logged_problem:
                self._has_logged_problem = True
                log.warning(
                    "Ostraca: objects of %s are neither stored nor loaded: %s", type(each).__name__, error
                )
            return None
        return L2Object(layout, memory)


def layout_of(shapes: Sequence[Any], dtypes: Sequence[Any], *, size_bytes: int | None = None) -> ObjectLayout:
    """Return the layout of tensors; the size is computed unless given."""
    pairs = list(zip(shapes, dtypes, strict=True))
    if size_bytes is None:
        size_bytes = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in pairs)
    return ObjectLayout(size_bytes, str([(list(shape), str(dtype)) for shape, dtype in pairs]))
