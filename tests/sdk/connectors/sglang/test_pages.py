"""Names, blocks and identities of SGLang's pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.connectors.sglang.plain_pools import PlainPool, PlainTensor, page_keys, rank_config

from ostraca.connectors.sglang.host_pools import further_pool, main_pool
from ostraca.connectors.sglang.pages import PageForm, leading, trailing_ends
from ostraca.connectors.sglang.settings import SglangSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX

KEYS = page_keys(50)


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5), block_bytes=st.integers(1, 40))
def test_blocks_cover_the_parts_of_a_page_once_and_in_order(sizes: list[int], block_bytes: int) -> None:
    form = PageForm(tuple(sizes), block_bytes)
    addresses = [1000 * number for number in range(len(sizes))]
    blocks = form.blocks(addresses)
    covered = [at + n for pieces in blocks for at, size in pieces for n in range(size)]
    assert covered == [at + n for at, size in zip(addresses, sizes, strict=True) for n in range(size)]
    assert [sum(size for _, size in pieces) for pieces in blocks[:-1]] == [block_bytes] * (len(blocks) - 1)
    assert len(blocks) == form.blocks_per_page == len(form.hashes(KEYS[:1]))


@given(blocks=st.integers(1, 5), begin=st.integers(0, 45), middle=st.integers(0, 4))
def test_a_block_has_one_place_however_the_prompt_is_cut_into_calls(
    blocks: int, begin: int, middle: int
) -> None:
    form = PageForm((10,) * blocks, 10)
    whole = form.run(KEYS, [])
    part = form.run(KEYS[begin : begin + middle + 1], KEYS[:begin])
    same = whole.chain[begin * blocks : (begin + middle + 1) * blocks]
    assert msgspec.structs.replace(part.chain.span(), chain_blocks=1000) == msgspec.structs.replace(
        same.span(), chain_blocks=1000
    )
    assert part.keys == whole.keys[begin * blocks : (begin + middle + 1) * blocks]


def test_pages_of_one_block_keep_the_engines_hash_and_all_other_hashes_differ() -> None:
    plain = PageForm((10,), 10)
    assert plain.hashes(KEYS) == [bytes.fromhex(key) for key in KEYS]
    forms = [plain, PageForm((10,), 10, "mamba"), PageForm((10,), 10, "swa"), PageForm((10,), 4)]
    hashes = [each for form in forms for each in form.hashes([*KEYS, "no hash", KEYS[0].upper()])]
    assert len(set(hashes)) == len(hashes) == 52 * (3 + 3)
    assert {len(each) for each in hashes} == {32}


@given(blocks=st.integers(1, 3), facts=st.sampled_from(["", "mamba"]), begin=st.integers(0, 45))
def test_generations_have_no_hash_in_common_and_cut_prompts_alike(
    blocks: int, facts: str, begin: int
) -> None:
    form = PageForm((10,) * blocks, 10, facts)
    hashes = [each for generation in (b"", b"1", b"2") for each in form.hashes(KEYS, generation)]
    assert len(set(hashes)) == len(hashes)
    whole, part = form.run(KEYS, [], b"1"), form.run(KEYS[begin:], KEYS[:begin], b"1")
    assert part.keys == whole.keys[begin * blocks :]
    same = whole.chain[begin * blocks :]
    assert msgspec.structs.replace(part.chain.span(), chain_blocks=1000) == msgspec.structs.replace(
        same.span(), chain_blocks=1000
    )


def test_a_page_is_good_if_all_its_blocks_are() -> None:
    form = PageForm((10, 10), 8)
    assert form.are_pages_good([True, True, True, True, False, True]) == [True, False]
    assert [leading(each) for each in ([], [True, False, True], [True, True])] == [0, 1, 2]


@given(are_there=st.lists(st.booleans(), max_size=20), window=st.integers(1, 5))
def test_a_trailing_window_is_complete_at_its_ends(are_there: list[bool], window: int) -> None:
    expected = [end for end in range(1, len(are_there) + 1) if all(are_there[max(0, end - window) : end])]
    assert trailing_ends(are_there, window) == expected


_POOL = frozenset({"layers", "layout", "dtype"})
_SETTINGS = frozenset({"revision", "block_bytes", "prefix_keys", "kv_cache_dtype"})


def layouts(changes: list[dict[str, object]]) -> list[bytes]:
    """Return the digest of the layout of each rank."""

    def digest(**change: object) -> bytes:
        settings = SglangSettings.of({name: change.pop(name) for name in _SETTINGS & change.keys()})
        is_flat = bool(change.pop("is_flat", False))
        pool = PlainPool(2, **{name: change.pop(name) for name in _POOL & change.keys()})  # type: ignore[arg-type]
        host_pool, identity = main_pool(
            pool,
            rank_config(**change),
            block_bytes=settings.block_bytes,
            kv_cache_dtype=settings.kv_cache_dtype,
            is_flat=is_flat,
        )
        return identity.layout(settings, block_bytes=host_pool.form.block_bytes).digest()

    return [digest(**change) for change in changes]


def test_facts_that_decide_the_bytes_give_layouts_of_their_own() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"layers": 5},
        {"layout": "layer_first"},
        {"dtype": "float16"},
        {"dtype": "uint8", "kv_cache_dtype": "fp8_e4m3"},
        {"dtype": "uint8", "kv_cache_dtype": "fp8_e5m2"},
        {"model_name": "other"},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2},
        {"is_mla_model": True, "dcp_size": 2},
        {"revision": "2"},
        {"block_bytes": 1 << 12},
        {"prefix_keys": True},
        {"is_flat": True},
        {"is_flat": True, "layout": "layer_first"},
    ]
    assert len(set(layouts(changes))) == len(changes)


def test_ranks_share_a_volume_and_replicated_ranks_a_copy() -> None:
    assert len(set(layouts([{"tp_size": 2, "tp_rank": rank} for rank in (0, 1)]))) == 1
    assert len(set(layouts([{"is_mla_model": True, "tp_size": size} for size in (1, 2)]))) == 1

    def rank(**changes: object) -> int:
        config = rank_config(tp_size=2, pp_size=2, attn_cp_size=3, attn_cp_rank=0, **changes)
        return main_pool(PlainPool(1), config, block_bytes=1 << 20, kv_cache_dtype="")[1].rank

    assert [rank(tp_rank=n) for n in (0, 1)] == [0, 1]
    assert [rank(tp_rank=n, is_mla_model=True) for n in (0, 1)] == [0, 0]
    assert rank(tp_rank=1, pp_rank=1) == 7


def test_further_pools_differ_by_name_and_by_rank_where_ranks_differ() -> None:
    class MambaPoolHost(PlainPool):
        """Pool with bytes of its own on each rank."""

    def hashes(pool: PlainPool, name: str, tp_rank: int) -> bytes:
        config = rank_config(is_mla_model=True, tp_size=2, tp_rank=tp_rank)
        main, _ = main_pool(PlainPool(2), config, block_bytes=1 << 20, kv_cache_dtype="")
        return b"".join(further_pool(pool, config, name, main.form).form.hashes(KEYS))

    pool, mamba = PlainPool(2), MambaPoolHost(2)
    assert hashes(pool, "indexer", 0) == hashes(pool, "indexer", 1) != hashes(pool, "swa", 0)
    assert hashes(mamba, "mamba", 0) != hashes(mamba, "mamba", 1)
    assert hashes(PlainPool(2, layers=2), "indexer", 0) != hashes(pool, "indexer", 0)


def test_memory_of_pages_is_viewed_in_place() -> None:
    pool = PlainPool(3, layout="layer_first")
    pool.fill(1)
    host_pool, _ = main_pool(pool, rank_config(), block_bytes=5000, kv_cache_dtype="")
    indices = np.concatenate([np.arange(8, 12), np.arange(4)])
    blocks = host_pool.blocks(indices)
    assert isinstance(blocks, list)
    assert len(blocks) == 2 * host_pool.form.blocks_per_page
    assert b"".join(part.tobytes() for block in blocks for part in block) == pool.page(2) + pool.page(0)
    blocks[0][0][:] = 7
    assert pool.page(2)[:4] == bytes([7] * 4)


@pytest.mark.parametrize("covered", [slice(None), slice(1), slice(1, 2)])
@pytest.mark.parametrize("block_bytes", [16 << 10, 32 << 10])
def test_blocks_are_rows_of_the_pool_if_they_lie_there_whole(covered: slice, block_bytes: int) -> None:
    pool = PlainPool(4)
    pool.fill(1)
    pool.kv_buffer = PlainTensor(pool.kv[covered])
    host_pool, _ = main_pool(pool, rank_config(), block_bytes=block_bytes, kv_cache_dtype="")
    assert (host_pool.rows is not None) == (block_bytes == 16 << 10)
    for page in range(4):
        blocks = host_pool.blocks(np.arange(4) + 4 * page)
        assert isinstance(blocks, list)
        parts = [np.ravel(part) for block in blocks for part in block]
        assert np.concatenate(parts).tobytes() == pool.page(page)


def test_memory_of_flat_pages_is_viewed_in_place_and_both_kinds_of_pages_are_told_apart() -> None:
    pool = PlainPool(3, layout="layer_first")
    pool.fill(1)
    flat, _ = main_pool(pool, rank_config(), block_bytes=5000, kv_cache_dtype="", is_flat=True)
    pages = [pool.get_data_page(8), pool.get_data_page(0)]
    blocks = flat.flat_blocks(pages)
    assert len(blocks) == 2 * flat.form.blocks_per_page
    assert b"".join(part.tobytes() for block in blocks for part in block) == b"".join(
        page.array.tobytes() for page in pages
    )
    blocks[0][0][:] = 7
    assert pages[0].array[0] == 7
    by_parts, _ = main_pool(pool, rank_config(), block_bytes=5000, kv_cache_dtype="")
    wrong: list[Callable[[], object]] = [
        lambda: flat.flat_blocks([PlainTensor(10)]),
        lambda: flat.blocks(np.arange(4)),
        lambda: by_parts.flat_blocks(pages),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match="differ"):
            call()


def test_pools_without_addresses_or_with_an_unknown_type_are_refused() -> None:
    with pytest.raises(ValueError, match="Unsupported layout: other"):
        main_pool(PlainPool(1, layout="other"), rank_config(), block_bytes=1 << 20, kv_cache_dtype="")
    with pytest.raises(UsageError, match='set kv_cache_dtype in "ostraca" of the extra configuration'):
        main_pool(PlainPool(1, dtype="uint8"), rank_config(), block_bytes=1 << 20, kv_cache_dtype="")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"lookup_deadline": 1},
            "the Ostraca backend of SGLang has no setting 'lookup_deadline'; did you mean",
        ),
        ({"block_bytes": 0}, "block_bytes is 0: give a value from 1"),
        ({"block_bytes": BLOCK_BYTES_MAX + 1}, "block_bytes is"),
        ({"loads_inflight_chunks_max": 1}, "loads_inflight_chunks_max has no effect"),
        ({"agents": "http://host"}, "http://host"),
        ({"load_deadline_s": 5000}, "load_deadline_s is 5000.0: give at most 3600; pass seconds"),
    ],
)
def test_a_wrong_setting_is_refused_with_advice(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SglangSettings.of(config)


def test_a_weights_file_is_part_of_the_layout(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    _, identity = main_pool(PlainPool(1), rank_config(), block_bytes=1 << 20, kv_cache_dtype="")
    digests = set()
    for content in (b"1", b"2"):
        file.write_bytes(content)
        settings = SglangSettings.of({"weights_file": str(file)})
        digests.add(identity.layout(settings, block_bytes=1 << 20).digest())
    assert len(digests) == 2
