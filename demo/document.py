"""The text, the questions about it, and the sizes of everything. Nothing here needs torch."""

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
    """The dimensions of a model. The default takes seconds for the document on two cores."""

    layers: int = 16
    heads: int = 8
    head_dim: int = 64
    hidden: int = 768
    feed_forward: int = 1536
    weight_spread: float = 0.1
    """The standard deviation of the weights: at Llama's usual 0.02 every answer is one byte over and over."""

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values, which are 32-bit floats."""
        return 2 * 4 * self.layers * self.heads * self.head_dim


SMALL = ModelSize(layers=4, heads=4, head_dim=32, hidden=128, feed_forward=256, weight_spread=0.3)
"""A toy that takes milliseconds."""


def document(tokens: int = DOCUMENT_TOKENS) -> list[int]:
    """Return the first `tokens` bytes of the text that all questions are about; a token is a byte.

    Raises ValueError when the text is not that long, or when these are no whole pages.
    """
    text = Path(__file__).with_name("document.txt").read_bytes()
    if not 0 < tokens <= len(text) or tokens % PAGE_TOKENS:
        msg = f"the text has {len(text)} tokens: ask for a multiple of {PAGE_TOKENS} up to that"
        raise ValueError(msg)
    return list(text[:tokens])
