"""Connector of an engine to Ostraca: names, puts, look-ups and gets of a document's pages."""

from collections.abc import Sequence

import ostraca
from demo.paging import KvCache, KvShape, engine_hashes

DEADLINE_S = 60.0
"""Far beyond every duration in the demo, so that a busy machine causes no loss."""


class SharedDocument:
    """Pages of a document in the fabric."""

    def __init__(self, client: ostraca.Client, tokens: Sequence[int], shape: KvShape) -> None:
        self.pages = range(len(tokens) // shape.page_tokens)
        self._tokens = tokens
        self._page_tokens = shape.page_tokens
        layout = ostraca.Layout(
            # The weights follow from the sizes and the seed, so these are the model's revision.
            model=f"ostraca-demo@{shape.layers}x{shape.kv_heads}x{shape.head_dim}-seed-0",
            dtype=str(shape.dtype).removeprefix("torch."),
            page_tokens=shape.page_tokens,
            groups=(ostraca.KvGroup(shape.layers, shape.kv_heads, shape.head_dim),),
        )
        self._volume = client.volume("demo", layout, block_bytes=shape.block_bytes, create=True)

    def chain(self) -> ostraca.Chain:
        """Name the pages, as an engine does for each request."""
        return self._volume.chain(engine_hashes(self._tokens, self._page_tokens))

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
