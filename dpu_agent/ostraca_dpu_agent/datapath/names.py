"""Names of blocks that have passed an agent's data path lately, for the agent with the feed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.wire.messages import NamesAnswer, NamesQuery

_ANSWER_BLOCKS = 4096
"""Blocks of an answer, about: 0.3 MB."""


class BlockNames:
    """Names of one volume's blocks, the newest. Use on the event loop's thread only."""

    def __init__(self, volume: str, *, names_max: int, first: int) -> None:
        """Keep names of *volume*, ``TENANT/NAME``, if not empty.

        *first* is the number of the first span, above all numbers of the agent's previous start.
        """
        self._volume = volume
        self._names_max = names_max
        self._next = first
        self._spans: deque[Span] = deque()
        self._names = 0

    def record(self, volume: ServedVolume, spans: Sequence[Span]) -> None:
        """Keep the names of a request's blocks, present or not."""
        if full_name(volume.record) != self._volume:
            return
        named = [span for span in spans if len(span)]
        self._spans.extend(named)
        self._next += len(named)
        self._names += sum(map(len, named))
        while self._names > self._names_max:
            self._names -= len(self._spans.popleft())

    def answer(self, query: NamesQuery) -> NamesAnswer:
        """Return the oldest spans from the number ``first`` on, as many as fit."""
        if query.volume != self._volume:
            return NamesAnswer(query.request, query.first, ())
        oldest = self._next - len(self._spans)
        begin = max(query.first, oldest) if query.first <= self._next else oldest
        spans: list[Span] = []
        blocks = 0
        for number in range(begin - oldest, len(self._spans)):
            if blocks >= _ANSWER_BLOCKS:
                break
            spans.append(self._spans[number])
            blocks += len(self._spans[number])
        return NamesAnswer(query.request, begin + len(spans), tuple(spans))


def full_name(record: VolumeRecord) -> str:
    """Return ``TENANT/NAME``."""
    return f"{record.tenant}/{record.name}"
