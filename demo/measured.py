"""What a run of the demo measured, and what follows from it.

A median here is a value that was measured: of four, the lower of the middle two.
"""

from dataclasses import dataclass
from statistics import median_low

from demo.messages import Asked, Question, Ready, Recomputed, Written


@dataclass(frozen=True, slots=True)
class Measured:
    """The reports of one run. Every time is a wall-clock time in seconds."""

    tokens: int
    ready: Ready
    written: Written
    recomputed: Recomputed
    loaded: Asked
    damaged: Asked
    mended: Asked

    @property
    def document_bytes(self) -> int:
        """The document's KV cache."""
        return self.ready.blocks * self.ready.block_bytes

    @property
    def recomputed_s(self) -> tuple[float, ...]:
        """For each question, the time to first token without the fabric.

        The document is computed once, and its time counts for each question: they are equal but for noise.
        """
        return tuple(self.recomputed.prefill_s + first_s for first_s in self.recomputed.first_token_s)

    @property
    def lost_blocks(self) -> int:
        """Blocks that the first question after the damage asked for and did not get."""
        return self.ready.blocks - self.damaged.questions[0].loaded

    def load_gbps(self, asked: Asked) -> tuple[float, ...]:
        """Return the rate of each question's get in GB/s; a GB is 10⁹ bytes."""
        block_gb = self.ready.block_bytes / 1e9
        return tuple(question.loaded * block_gb / question.load_s for question in asked.questions)

    def ratios(self, asked: Asked) -> tuple[float, ...]:
        """Return how many times sooner each question got its first token than by recomputing."""
        pairs = zip(self.recomputed_s, totals_s(asked), strict=True)
        return tuple(recomputed_s / total_s for recomputed_s, total_s in pairs)

    def ratio(self, asked: Asked) -> float:
        """Return the ratio of the median times to first token."""
        return median_low(self.recomputed_s) / median_low(totals_s(asked))


def totals_s(asked: Asked) -> tuple[float, ...]:
    """Return each question's time to first token."""
    return tuple(question.total_s for question in asked.questions)


def middle(asked: Asked) -> Question:
    """Return the question with the median time to first token."""
    median_s = median_low(totals_s(asked))
    return next(question for question in asked.questions if question.total_s == median_s)
