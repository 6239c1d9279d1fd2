"""Measurements of a demo run, and derived figures.

A median here is a measured value: of four values, the lower of the two in the middle.
"""

from dataclasses import dataclass
from statistics import median_low

from demo.messages import AnswersReport, Question, Ready, RecomputeReport, WriteReport


@dataclass(frozen=True, slots=True)
class DemoResults:
    """Reports of a run, with wall-clock times in seconds."""

    tokens: int
    ready: Ready
    written: WriteReport
    recomputed: RecomputeReport
    loaded: AnswersReport
    damaged: AnswersReport
    mended: AnswersReport

    @property
    def document_bytes(self) -> int:
        """Bytes of the document's KV cache."""
        return self.ready.blocks * self.ready.block_bytes

    @property
    def recomputed_s(self) -> tuple[float, ...]:
        """Time to the first token without the fabric, for each question.

        The document is computed once, and its time counts for each question: repeated runs differ only by
        noise.
        """
        return tuple(self.recomputed.prefill_s + first_s for first_s in self.recomputed.first_token_s)

    @property
    def lost_blocks(self) -> int:
        """Number of blocks missing for the first question after the damage."""
        return self.ready.blocks - self.damaged.questions[0].loaded

    def load_gbps(self, asked: AnswersReport) -> tuple[float, ...]:
        """Return the rate of each question's get in GB/s; a GB is 10⁹ bytes."""
        block_gb = self.ready.block_bytes / 1e9
        return tuple(question.loaded * block_gb / question.load_s for question in asked.questions)

    def ratios(self, asked: AnswersReport) -> tuple[float, ...]:
        """Return, for each question, the speed-up of the first token over recomputing."""
        pairs = zip(self.recomputed_s, totals_s(asked), strict=True)
        return tuple(recomputed_s / total_s for recomputed_s, total_s in pairs)

    def ratio(self, asked: AnswersReport) -> float:
        """Return the ratio of the median times to first token."""
        return median_low(self.recomputed_s) / median_low(totals_s(asked))


def totals_s(asked: AnswersReport) -> tuple[float, ...]:
    """Return each question's time to first token."""
    return tuple(question.total_s for question in asked.questions)


def middle(asked: AnswersReport) -> Question:
    """Return the question with the median time to first token."""
    median_s = median_low(totals_s(asked))
    return next(question for question in asked.questions if question.total_s == median_s)
