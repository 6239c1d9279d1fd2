from __future__ import annotations

from dataclasses import replace

from tests.support.agent.assembly import LAYOUT, TENANT

from ostraca_dpu_agent.datapath.space import depths_of, is_too_short
from ostraca_dpu_agent.volumes import ServedVolume
from ostraca_fabric.model.chain import DEPTH_UNKNOWN, Chain
from ostraca_fabric.model.volume import VolumeIdentity, VolumeRecord

VOLUME = ServedVolume(
    VolumeRecord(TENANT, "v", LAYOUT, 4096), VolumeIdentity(TENANT, "v", LAYOUT.digest()), b"", b""
)


def chain(blocks: int, *, is_chained: bool = True) -> Chain:
    return Chain.of([bytes([n]) * 32 for n in range(blocks)], hash_bytes=32, is_chained=is_chained)


def test_depths_count_from_the_root_whatever_slice_is_named() -> None:
    spans = [chain(5)[3:].span(), chain(2, is_chained=False).span(), replace(chain(1), before=64).span()]
    assert depths_of(spans).tolist() == [3, 4, DEPTH_UNKNOWN, DEPTH_UNKNOWN, 64]
    assert depths_of([]).tolist() == []


def test_a_chain_is_too_short_by_its_whole_length_and_not_by_the_slice() -> None:
    volume = replace(VOLUME, break_even_tokens=10 * LAYOUT.page_tokens)
    spans = [chain(10)[:2].span(), chain(9).span(), chain(3, is_chained=False).span()]
    assert is_too_short(volume, spans).tolist() == [False] * 2 + [True] * 9 + [False] * 3
    assert not is_too_short(VOLUME, spans).any()
    assert is_too_short(volume, []).tolist() == []
