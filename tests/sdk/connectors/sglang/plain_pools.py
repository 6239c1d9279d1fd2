"""Host pools in plain memory with SGLang's attributes, for tests without SGLang."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np

from ostraca.connectors.sglang.host_pools import HostPool, main_pool
from ostraca.connectors.sglang.page_store import PageStore
from ostraca.connectors.sglang.settings import SglangSettings

PAGE_TOKENS = 4
ROW_BYTES = 1 << 10
"""Bytes of a token in keys or values of one layer."""


class PlainTensor:
    """Bytes with the attributes of a tensor of torch."""

    def __init__(self, content: bytes | int | np.ndarray) -> None:
        if not isinstance(content, np.ndarray):
            content = np.frombuffer(bytearray(content), np.uint8)
        self.array: np.ndarray = content
        self.nbytes = self.array.nbytes

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


class PlainPool:
    """Pool of keys and values: layers first, or pages first, as SGLang lays out its pools."""

    def __init__(
        self, pages: int, *, layers: int = 4, layout: str = "page_first", dtype: str = "bf16"
    ) -> None:
        self.page_size, self.layer_num, self.layout = PAGE_TOKENS, layers, layout
        self.dtype, self.head_num, self.head_dim = f"torch.{dtype}", 4, 128
        self.size_per_token = 2 * layers * ROW_BYTES
        shape = (
            (2, layers, pages, PAGE_TOKENS) if layout == "layer_first" else (2, pages, layers, PAGE_TOKENS)
        )
        self.kv = np.zeros((*shape, ROW_BYTES), np.uint8)
        self.kv_buffer = PlainTensor(self.kv)

    def fill(self, seed: int) -> np.ndarray:
        """Fill with bytes that differ everywhere; return a copy."""
        self.kv[...] = np.random.default_rng(seed).integers(0, 256, self.kv.shape, np.uint8)
        return self.kv.copy()

    def page(self, number: int) -> bytes:
        """Return the bytes of a page, in the order of the parts."""
        is_layer_first = self.layout == "layer_first"
        part = self.kv[:, :, number].swapaxes(0, 1) if is_layer_first else self.kv[:, number]
        return part.tobytes()

    def get_dummy_flat_data_page(self) -> PlainTensor:
        return PlainTensor(self.size_per_token * PAGE_TOKENS)

    def get_data_page(self, index: int) -> PlainTensor:
        """Copy a page with all keys first, as SGLang does, in the layout of the pool."""
        number = index // PAGE_TOKENS
        is_layer_first = self.layout == "layer_first"
        return PlainTensor((self.kv[:, :, number] if is_layer_first else self.kv[:, number]).tobytes())

    def get_page_buffer_meta(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        assert len(indices) % PAGE_TOKENS == 0
        parts = []
        for first in indices.tolist()[::PAGE_TOKENS]:
            number = first // PAGE_TOKENS
            if self.layout == "layer_first":
                parts += [self.kv[k, layer, number] for layer in range(self.layer_num) for k in (0, 1)]
            elif self.layout == "page_first":
                parts += [self.kv[k, number] for k in (0, 1)]
            else:
                raise ValueError(f"Unsupported layout: {self.layout}")
        return [part.ctypes.data for part in parts], [part.nbytes for part in parts]


def rank_config(**changes: object) -> SimpleNamespace:
    """Return the storage configuration of a rank, as SGLang passes."""
    plain = {"model_name": "test/model", "is_mla_model": False, "tp_rank": 0, "tp_size": 1}
    return SimpleNamespace(**(plain | {"pp_rank": 0, "pp_size": 1} | changes))


def settings(address: str, **changes: object) -> SglangSettings:
    plain = {
        "agents": address,
        "arena_bytes": 32 << 20,
        "transports": ["inline"],
        "lookup_deadline_s": 2.0,
        "load_deadline_s": 5.0,
        "prefix_keys": True,
        "backoff_s": 0.1,
        "backoff_max_s": 0.2,
        "connect_retry_s": 0.05,
    }
    return SglangSettings.of(plain | changes)


def page_keys(count: int, *, prompt: str = "prompt") -> list[str]:
    """Return SGLang's keys of a prompt's pages."""
    return [hashlib.sha256(f"{prompt} {number}".encode()).hexdigest() for number in range(count)]


def token_indices(*pages: int) -> np.ndarray:
    return np.concatenate([np.arange(PAGE_TOKENS) + page * PAGE_TOKENS for page in pages])


def opened(
    backend_settings: SglangSettings,
    pool: PlainPool,
    config: SimpleNamespace | None = None,
    *,
    is_flat: bool = False,
) -> tuple[PageStore, HostPool]:
    """Return store and pool of a rank, as the adapter opens both."""
    host_pool, identity = main_pool(
        pool,
        config or rank_config(),
        block_bytes=backend_settings.block_bytes,
        kv_cache_dtype=backend_settings.kv_cache_dtype,
        is_flat=is_flat,
    )
    store = PageStore(backend_settings, identity, block_bytes=host_pool.form.block_bytes)
    if host_pool.rows is not None:
        store.register(host_pool.rows)
    return store, host_pool
