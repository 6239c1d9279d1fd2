"""Connector of an engine to Ostraca: names, puts, look-ups and gets of a document's pages."""

from collections.abc import Sequence

from transformers import LlamaForCausalLM

import ostraca
from demo.document import PAGE_TOKENS
from demo.paging import KvCache
from ostraca.connectors.transformers import ModelPages

DEADLINE_S = 60.0
"""Far beyond every duration in the demo, so that a busy machine causes no loss."""


class SharedDocument:
    """Pages of a document in the fabric."""

    def __init__(self, client: ostraca.Client, tokens: Sequence[int], model: LlamaForCausalLM) -> None:
        self.pages = range(len(tokens) // PAGE_TOKENS)
        self._tokens = tokens
        # The weights follow from the sizes and the seed.
        self._pages = ModelPages(client, model, weights="seed-0", page_tokens=PAGE_TOKENS)
        self._volume = self._pages.volume

    def chain(self) -> ostraca.Chain:
        """Name the pages, as an engine does for each request."""
        return self._pages.chain(self._tokens)

    def lookup(self, chain: ostraca.Chain) -> ostraca.LookupResult:
        """Look up the present pages."""
        return self._volume.lookup(chain, deadline_s=DEADLINE_S)

    def load(self, chain: ostraca.Chain, cache: KvCache) -> ostraca.GetResult:
        """Load the present pages into the cache, at the model's own addresses."""
        return self._volume.get(chain, into=cache.blocks(self.pages), deadline_s=DEADLINE_S)

    def store(self, cache: KvCache, pages: Sequence[int]) -> list[ostraca.PutResult]:
        """Put these pages, run by run; return the result of each run after its commit."""
        chain = self.chain()
        return [
            self._volume.put(
                chain[run.start : run.stop],
                source=cache.blocks(run),
                deadline_s=DEADLINE_S,
                ack=ostraca.Ack.COMMITTED,
            )
            for run in runs(pages)
        ]


def runs(pages: Sequence[int]) -> list[range]:
    """Cut ascending pages into runs of consecutive pages."""
    found: list[range] = []
    for page in pages:
        if found and found[-1].stop == page:
            found[-1] = range(found[-1].start, page + 1)
        else:
            found.append(range(page, page + 1))
    return found
