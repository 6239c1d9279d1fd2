"""Pages for routers: whole, without holes, and bounded."""

from __future__ import annotations

from ostraca_dpu_agent.feed.pages import FedPage, FedPages, PageEvent, Part
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.policies.rounds import Rounds

PARTS: list[Part] = [(0, 0), (1, 0)]
PAGES = [bytes([number]) * 32 for number in range(40)]
REPEAT_S = 30.0


def fed(*, pages_max: int = 100) -> FedPages:
    rounds = Rounds[FedPage](round_s=1.0, rate_per_s=1000.0)
    return FedPages(rounds, parts=PARTS, pages_max=pages_max, repeat_s=REPEAT_S)


def learn(
    feed: FedPages, pages: list[bytes], *, is_chained: bool = True, ranks: tuple[int, ...] = (0, 1)
) -> None:
    feed.learn(Chain.of(pages, hash_bytes=32, rank=rank, is_chained=is_chained).span() for rank in ranks)


def find(
    feed: FedPages, pages: list[bytes], now_s: float = 0.0, *, lost: tuple[bytes, ...] = ()
) -> list[PageEvent]:
    feed.record({page: dict.fromkeys(PARTS, page not in lost) for page in pages}, now_s)
    return feed.take_events()


def stored(*pages: bytes) -> list[PageEvent]:
    return [PageEvent(page, is_removed=False) for page in pages]


def removed(*pages: bytes) -> list[PageEvent]:
    return [PageEvent(page, is_removed=True) for page in pages]


def test_a_page_is_announced_once_all_its_blocks_are_found() -> None:
    feed = fed()
    learn(feed, PAGES[:1], ranks=(0,))
    feed.record({PAGES[0]: {(0, 0): True}}, 0.0)
    assert (feed.take_events(), feed.announced) == ([], 0)
    learn(feed, PAGES[:1], ranks=(1,))
    assert find(feed, PAGES[:1]) == stored(PAGES[0])
    assert find(feed, PAGES[:1]) == []
    feed.record({PAGES[0]: {(0, 0): True, (1, 0): False}}, 0.0)
    assert (feed.take_events(), feed.announced) == (removed(PAGES[0]), 0)


def test_pages_after_a_lost_page_are_withdrawn_and_return_with_the_page() -> None:
    feed = fed()
    learn(feed, PAGES[:4])
    assert find(feed, PAGES[:4]) == stored(*PAGES[:4])
    assert find(feed, PAGES[1:2], lost=(PAGES[1],)) == removed(PAGES[1], PAGES[2], PAGES[3])
    assert find(feed, PAGES[2:4]) == []
    assert find(feed, PAGES[1:2]) == stored(PAGES[1], PAGES[2], PAGES[3])
    assert feed.announced == 4


def test_pages_without_order_count_by_themselves() -> None:
    feed = fed()
    learn(feed, PAGES[:3], is_chained=False)
    assert find(feed, PAGES[:3], lost=(PAGES[0],)) == stored(PAGES[1], PAGES[2])


def test_announcements_are_repeated_for_routers_that_lost_them() -> None:
    feed = fed()
    learn(feed, PAGES[:2])
    find(feed, PAGES[:2])
    assert find(feed, PAGES[:2], REPEAT_S - 1) == []
    assert find(feed, PAGES[:2], REPEAT_S) == stored(*PAGES[:2])
    feed.repeat_all()
    assert find(feed, PAGES[:2], REPEAT_S + 1) == stored(*PAGES[:2])
    assert feed.announced == 2


def test_the_oldest_pages_beyond_the_limit_are_withdrawn() -> None:
    feed = fed(pages_max=3)
    learn(feed, PAGES[:3])
    find(feed, PAGES[:3])
    learn(feed, PAGES[10:12])
    assert feed.take_events() == removed(*PAGES[:2])
    assert (len(feed), feed.announced) == (3, 1)
    assert find(feed, PAGES[2:3]) == [], "its predecessors are unknown now"


def test_a_chain_with_repeated_pages_is_announced_and_forgotten() -> None:
    feed = fed(pages_max=2)
    learn(feed, [PAGES[0], PAGES[0], PAGES[1], PAGES[0]])
    assert find(feed, PAGES[:2]) == stored(*PAGES[:2])
    learn(feed, [PAGES[1], PAGES[0]])
    learn(feed, PAGES[2:4])
    assert (feed.take_events(), len(feed)) == (removed(*PAGES[:2]), 2)


def test_a_page_learned_again_has_a_single_turn_per_round() -> None:
    feed = fed(pages_max=2)
    for page in (*PAGES[:4], *PAGES[:2]):
        learn(feed, [page])
    assert feed.take_due(10)[0] == PAGES[:2]


def test_blocks_of_other_ranks_are_ignored() -> None:
    feed = fed()
    learn(feed, PAGES[:1], ranks=(1, 2, 3))
    assert [span.rank for span, _ in feed.spans(PAGES[:1])] == [1]


def test_lookups_name_each_known_block_with_its_placement() -> None:
    feed = fed()
    chain = Chain.of(PAGES, hash_bytes=32, rank=1)
    feed.learn([chain.span()])
    due, pause_s = feed.take_due(100)
    ((span, pages),) = feed.spans(due)
    assert (due, pages, pause_s) == (PAGES, PAGES, 1.0)
    assert (span.hashes, span.rank, span.group) == (b"".join(PAGES), 1, 0)
    assert span.units == PAGES[0] * 32 + PAGES[32] * 8, "by stripe unit, as the writer placed them"
