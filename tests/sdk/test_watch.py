"""News of blocks: announced, withdrawn, and looked up in turn. The vLLM tier's tests have a real fabric."""

from __future__ import annotations

from typing import NamedTuple

from ostraca.watch import BlockAnnouncement, BlockNews
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.policies.rounds import Rounds

KEYS = [bytes([number]) * 32 for number in range(5)]


class KeyedRun(NamedTuple):
    chain: Chain
    keys: tuple[bytes, ...]


def run_of(keys: list[bytes]) -> KeyedRun:
    return KeyedRun(Chain.of(keys, hash_bytes=32), tuple(keys))


def block_news(announced_max: int = 100) -> BlockNews:
    return BlockNews(Rounds(round_s=1.0, rate_per_s=1000.0), announced_max=announced_max)


def test_the_oldest_announcements_beyond_the_bound_are_withdrawn() -> None:
    news = block_news(announced_max=2)
    news.announce(run_of(KEYS[:3]), KEYS[:3])
    news.announce(run_of(KEYS[3:5]), ())
    news.withdraw(KEYS[:2])
    assert news.take() == [
        BlockAnnouncement(tuple(KEYS[:3]), is_removed=False),
        BlockAnnouncement((KEYS[0],), is_removed=True),
        BlockAnnouncement((KEYS[1],), is_removed=True),
    ]
    assert (news.take(), len(news)) == ([], 1)


def test_a_lookup_overtaken_by_a_store_withdraws_nothing() -> None:
    news = block_news()
    news.announce(run_of(KEYS[:3]), KEYS[:3])
    ((due,), pause_s) = news.take_due()
    news.announce(run_of(KEYS[:2]), KEYS[:2])
    news.take()
    news.drop(due, KEYS[:3])
    assert (pause_s, news.take()) == (1.0, [BlockAnnouncement((KEYS[2],), is_removed=True)])
    assert [len(run.keys) for run in news.take_due()[0]] == [2], "a run without announced blocks is dropped"
