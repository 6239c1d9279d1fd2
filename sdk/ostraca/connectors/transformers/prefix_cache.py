"""Loads and stores of prompts' prefixes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ostraca.client import Client
from ostraca.connectors.transfers.explain_command import explain_command
from ostraca.connectors.transformers.pages import ModelPages
from ostraca.results import PutResult
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.outcome import Ack

log = logging.getLogger("ostraca.transformers")


class PrefixCache:
    """Prefixes of prompts for one model, shared with all engines that serve the same weights."""

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        weights: str,
        page_tokens: int = 64,
        cache_salt: str = "",
        deadline_s: float = 10.0,
    ) -> None:
        """Open the volume, as ``ModelPages``. Each load and store ends within *deadline_s* or twice that.

        Raises UsageError.
        """
        self.pages = ModelPages(
            client, model, weights=weights, page_tokens=page_tokens, cache_salt=cache_salt
        )
        self._config = model.config
        self._device = model.device
        self._deadline_s = deadline_s

    def load(self, tokens: Sequence[int] | torch.Tensor) -> DynamicCache:
        """Return a cache with the known prefix of *tokens*, in whole pages; possibly empty.

        A tensor has the shape (n,) or (1, n). The last token is always left to compute, since its logits are
        wanted. Raises UsageError for a batch.
        """
        tokens, pages, cache = _tokens_of(tokens), self.pages, DynamicCache(config=self._config)
        chain = pages.chain(tokens[:-1])
        found = pages.volume.lookup(chain, deadline_s=self._deadline_s).prefix
        if not found:
            if len(chain):
                log.debug(
                    "Ostraca: no page is found; explain the first with: %s",
                    explain_command(pages.volume, chain),
                )
            return cache
        shape = (2 * pages.layers, 1, pages.kv_heads, found * pages.page_tokens, pages.head_dim)
        states = torch.empty(shape, dtype=pages.dtype, device=self._device)
        into = [self._parts(states, page) for page in range(found)]
        got = pages.volume.get(chain[:found], into=into, deadline_s=self._deadline_s).prefix
        if got:
            for layer in range(pages.layers):
                keys, values = states[2 * layer : 2 * layer + 2, :, :, : got * pages.page_tokens]
                cache.update(keys, values, layer)
        return cache

    def store(
        self, tokens: Sequence[int] | torch.Tensor, cache: DynamicCache, *, ack: Ack = Ack.STAGED
    ) -> PutResult:
        """Store the pages of *tokens* that *cache* has and the fabric lacks.

        The cache holds the states of *tokens*, possibly followed by others. Raises UsageError for a batch,
        for the cache of a pass that failed, and for other kinds of caches.
        """
        tokens, pages = _tokens_of(tokens), self.pages
        filled = min(len(tokens), cache.get_seq_length())
        parts = list(states_of(cache)) if filled else []
        if parts:
            pages.check(parts)
        chain = pages.chain(tokens[:filled])
        known = pages.volume.lookup(chain, deadline_s=self._deadline_s).prefix
        source = [self._parts(parts, page) for page in range(known, len(chain))]
        return pages.volume.put(chain[known:], source=source, deadline_s=self._deadline_s, ack=ack)

    def _parts(self, states: Sequence[torch.Tensor] | torch.Tensor, page: int) -> list[torch.Tensor]:
        """Return the views of a page: keys before values, layer by layer."""
        begin, end = page * self.pages.page_tokens, (page + 1) * self.pages.page_tokens
        return [part[:, :, begin:end] for part in states]


def _tokens_of(tokens: Sequence[int] | torch.Tensor) -> Sequence[int]:
    """Return the tokens of one prompt. Raises UsageError for more."""
    if not isinstance(tokens, torch.Tensor):
        return tokens
    if tuple(tokens.shape[-1:]) != (tokens.numel(),):
        raise UsageError(f"tokens of shape {tuple(tokens.shape)}: load and store each prompt alone")
    return tokens.flatten().tolist()


def states_of(cache: DynamicCache) -> Iterator[torch.Tensor]:
    """Yield keys before values, layer by layer, of a filled cache: (1, KV heads, tokens, head size) each.

    Raises UsageError for other kinds of caches, which keep quantized states, a window or empty places.
    """
    for layer in cache.layers:
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise UsageError(f"a cache with a {type(layer).__name__}, or without states of some layer")
        yield layer.keys
        yield layer.values
