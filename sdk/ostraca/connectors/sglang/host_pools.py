"""Host pools of SGLang, known only by their attributes: forms, memory and identity of pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ostraca.connectors.sglang.pages import PageForm
from ostraca.connectors.sglang.settings import RankIdentity
from ostraca.connectors.transfers.rows import Blocks, PoolRows
from ostraca_fabric.errors import UsageError

Foreign: TypeAlias = Any
"""Object of SGLang."""

Pieces: TypeAlias = Sequence[tuple[int, int]]
"""Address and bytes of each piece of a block."""

_FACTS = ("dtype", "layout", "page_size", "layer_num", "head_num", "head_dim", "v_head_dim")

_SHARDED_POOLS = frozenset({"MHATokenToKVPoolHost", "MambaPoolHost"})
"""Classes of pools with other bytes on each tensor-parallel rank, even for models with one copy of KV."""

_BITS_8 = "uint8"
"""SGLang stores all types of 8 bits as this."""


class HostPool:
    """Pool of pages in host memory."""

    def __init__(
        self, pool: Foreign, part_bytes: tuple[int, ...], form: PageForm, *, is_flat: bool = False
    ) -> None:
        self._pool = pool
        self._part_bytes = part_bytes
        self._is_flat = is_flat
        self._memory = None if is_flat else _blocks_of(pool, form)
        self.form = form
        self.rows = None if self._memory is None else PoolRows(self._memory)
        """Rows of a block each; None if blocks are no rows of the pool's memory."""

    def blocks(self, host_indices: Foreign) -> Blocks:
        """Return the memory of the blocks of pages, without a copy.

        The pool keeps the memory in place. Raises ValueError for pages of another form, and errors of SGLang.
        """
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        count = len(self._part_bytes)
        if self._is_flat or tuple(sizes) != self._part_bytes * (len(addresses) // count):
            raise ValueError("the parts of a page differ from the registered pool")
        pages = [addresses[begin : begin + count] for begin in range(0, len(addresses), count)]
        blocks = [pieces for page in pages for pieces in self.form.blocks(page)]
        return self._in_rows(blocks) or _views(blocks)

    def flat_blocks(self, pages: Sequence[Foreign]) -> list[list[NDArray[np.uint8]]]:
        """Return the memory of the blocks of SGLang's flat pages, as views without a copy.

        The caller keeps the pages alive. Raises ValueError for pages of another form.
        """
        sizes = {page.nbytes if page.is_contiguous() else -1 for page in pages}
        if not self._is_flat or sizes - set(self._part_bytes):
            raise ValueError("the size of a flat page differs from the registered pool")
        return _views([piece for page in pages for piece in self.form.blocks([page.data_ptr()])])

    def _in_rows(self, blocks: Sequence[Pieces]) -> Blocks | None:
        """Return blocks as rows; None if not all of them are."""
        if self._memory is None or self.rows is None:
            return None
        offsets = np.array([pieces[0][0] for pieces in blocks]) - self._memory.ctypes.data
        numbers, within = np.divmod(offsets, self.form.block_bytes)
        if within.any() or (numbers < 0).any() or (numbers >= len(self._memory)).any():
            return None
        return self.rows.blocks(numbers.tolist())


def main_pool(
    pool: Foreign, config: Foreign, *, block_bytes: int, kv_cache_dtype: str, is_flat: bool = False
) -> tuple[HostPool, RankIdentity]:
    """Return the main pool of a rank, with the rank's identity.

    *kv_cache_dtype* is the type of KV for SGLang. With *is_flat*, SGLang passes copies of pages, in an order
    of bytes of their own. Raises UsageError if an unknown type has 8 bits, and errors of SGLang for a layout
    without addresses.
    """
    part_bytes = _part_bytes(pool)
    if is_flat and part_bytes:
        part_bytes = (pool.get_dummy_flat_data_page().nbytes,)
    stored = str(pool.dtype).removeprefix("torch.")
    if stored == _BITS_8 and part_bytes and not kv_cache_dtype:
        raise UsageError(
            'the KV cache has 8 bits of an unknown type: set kv_cache_dtype in "ostraca" of the extra '
            "configuration, as in --kv-cache-dtype"
        )
    identity = RankIdentity(
        model=config.model_name or "unnamed",
        dtype=stored,
        page_tokens=pool.page_size,
        layers=pool.layer_num,
        tensor=(config.tp_rank, config.tp_size),
        pipeline=(config.pp_rank, config.pp_size),
        context=(getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)),
        is_replicated=config.is_mla_model,
        packing={
            "pool": _facts(pool, part_bytes) + (" flat" if is_flat else ""),
            "kv_cache_dtype": kv_cache_dtype if stored == _BITS_8 else "",
            "decode_context": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
        },
    )
    form = PageForm(part_bytes, min(block_bytes, sum(part_bytes) or block_bytes), rank=identity.rank)
    return HostPool(pool, part_bytes, form, is_flat=is_flat), identity


def further_pool(pool: Foreign, config: Foreign, name: str, main: PageForm) -> HostPool:
    """Return a further pool of a model with several kinds of state.

    Raises errors of SGLang for a layout without addresses.
    """
    part_bytes = _part_bytes(pool)
    facts = f"{name} {_facts(pool, part_bytes)}"
    if config.is_mla_model and any(each.__name__ in _SHARDED_POOLS for each in type(pool).__mro__):
        facts += f" rank {config.tp_rank}/{config.tp_size}"
    return HostPool(pool, part_bytes, PageForm(part_bytes, main.block_bytes, facts, main.rank))


def _blocks_of(pool: Foreign, form: PageForm) -> NDArray[np.uint8] | None:
    """Return a pool's memory, shape (blocks, bytes); None unless each part of a page is whole blocks."""
    memory: Foreign = getattr(pool, "kv_buffer", None)
    if not (form.part_bytes and hasattr(memory, "data_ptr") and memory.is_contiguous()):
        return None
    if any(size % form.block_bytes for size in (memory.nbytes, *form.part_bytes)):
        return None
    return _view(memory.data_ptr(), memory.nbytes).reshape(-1, form.block_bytes)


def _views(blocks: Sequence[Pieces]) -> list[list[NDArray[np.uint8]]]:
    return [[_view(at, size) for at, size in pieces] for pieces in blocks]


def _view(address: int, size_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _part_bytes(pool: Foreign) -> tuple[int, ...]:
    """Return the sizes of a page's parts; empty for a pool that only counts pages."""
    if getattr(pool, "size_per_token", None) == 0:
        return ()
    # A page's indices; ``tolist`` and a length are all that pools read.
    return tuple(pool.get_page_buffer_meta(np.arange(getattr(pool, "logical_page_size", pool.page_size)))[1])


def _facts(pool: Foreign, part_bytes: Sequence[int]) -> str:
    """Return the facts that decide the meaning of a page's bytes."""
    named = (f"{name}={getattr(pool, name, None)}" for name in _FACTS)
    return f"{type(pool).__name__} {' '.join(named)} parts={list(part_bytes)}"
