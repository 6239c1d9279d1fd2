"""Text, questions and sizes of the demo, without torch."""

from dataclasses import dataclass
from pathlib import Path

PAGE_TOKENS = 16
DOCUMENT_TOKENS = 4096
ANSWER_TOKENS = 24

QUESTIONS = (
    "Question: what did a voter hand in at the market place?\nAnswer:",
    "Question: who helped a farmer to spell his own name?\nAnswer:",
    "Question: why does ink on fired clay last?\nAnswer:",
    "Question: what did the scribes of Deir el-Medina write down?\nAnswer:",
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Dimensions of a model. The default size takes seconds for the document on two cores."""

    layers: int = 16
    heads: int = 8
    head_dim: int = 64
    hidden: int = 768
    feed_forward: int = 1536
    weight_spread: float = 0.1
    """Standard deviation of the weights. Llama's usual 0.02 repeats the same byte in every answer."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, as 32-bit floats."""
        return 2 * 4 * self.layers * self.heads * self.head_dim


SMALL = ModelSize(layers=4, heads=4, head_dim=32, hidden=128, feed_forward=256, weight_spread=0.3)
"""Toy of milliseconds."""


def document(tokens: int = DOCUMENT_TOKENS) -> list[int]:
    """Return the first `tokens` bytes of the text of all questions; a token is a byte.

    Raises ValueError for more tokens than the text has, and for a part of a page.
    """
    text = Path(__file__).with_name("document.txt").read_bytes()
    if not 0 < tokens <= len(text) or tokens % PAGE_TOKENS:
        msg = f"the text has {len(text)} tokens: ask for a multiple of {PAGE_TOKENS} up to that"
        raise ValueError(msg)
    return list(text[:tokens])
