"""What to say when none of an enclosure's controllers could be connected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.ports.paths import PathError, Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

_ORDER = tuple(Stage)


def furthest(errors: Sequence[PathError]) -> PathError:
    """Return one error for all of them, of which there is at least one.

    Its stage is the furthest that any of them reached: an enclosure that refuses this host is there, whatever
    else is not.
    """
    stage = max((error.stage for error in errors), key=_ORDER.index)
    first = [error for error in errors if error.stage is stage]
    others = [error for error in errors if error.stage is not stage]
    return PathError(stage, "; ".join(dict.fromkeys(str(error) for error in (*first, *others))))
