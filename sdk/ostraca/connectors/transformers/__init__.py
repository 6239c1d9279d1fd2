"""Prefixes of prompts for models of Hugging Face transformers.

``PrefixCache`` loads the known prefix of a prompt into a ``DynamicCache``, and stores a filled one::

    prefixes = PrefixCache(client, model, weights="2024-09-25")
    cache = prefixes.load(tokens)
    model(torch.tensor([tokens[cache.get_seq_length():]]), past_key_values=cache)
    prefixes.store(tokens, cache)

- ``pages``: names of pages, and the volume of a model
- ``prefix_cache``: loads and stores
"""

from ostraca.connectors.transformers.pages import ModelPages, page_hashes
from ostraca.connectors.transformers.prefix_cache import PrefixCache

__all__ = ["ModelPages", "PrefixCache", "page_hashes"]
