"""Messages between the demo and its worker processes, each a line of JSON."""

from dataclasses import dataclass, field

import msgspec

from demo.document import DOCUMENT_TOKENS, ModelSize


@dataclass(frozen=True, slots=True)
class Task:
    """Common parameters of all workers of a run, on the command line of each process."""

    address: str
    tokens: int = DOCUMENT_TOKENS
    model: ModelSize = field(default_factory=ModelSize)


class Order(msgspec.Struct, frozen=True, tag=True):
    """Order to a worker."""


class Write(Order, frozen=True):
    """Compute the document's cache and put the pages, acknowledged when committed."""


class Ask(Order, frozen=True):
    """Answer each question from an empty cache: look up, get, recompute the holes.

    After each answer, the worker puts the recomputed pages.
    """


class Recompute(Order, frozen=True):
    """Compute the document again and answer each question, without the fabric."""


class Compare(Order, frozen=True):
    """Compare pages and answers of the last `Ask` and the last `Recompute`."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Report of a worker. Times are wall-clock seconds."""


class Ready(Report, frozen=True):
    """Report of a ready model and connection."""

    transport: str
    """Transport of blocks: ``nixl`` or ``inline``."""

    parameters: int
    threads: int
    blocks: int
    block_bytes: int


class WriteReport(Report, frozen=True):
    """Report of a computed and stored document."""

    prefill_s: float
    put_s: float
    outcome: str
    """Counts of all blocks by state, for people."""

    committed: int
    shard_blocks: dict[str, int]
    """Number of blocks in each shard, by the shard's name."""


class Question(msgspec.Struct, frozen=True):
    """Times of a question, and results of the document's blocks."""

    listed: int
    """Hits of the look-up."""

    loaded: int
    """Verified blocks in the model's cache after the get."""

    outcome: str
    """Counts of the get's blocks by state, for people."""

    recomputed: int
    """Blocks computed due to a hole in their chunk."""

    lookup_s: float
    load_s: float
    recompute_s: float
    first_token_s: float
    """Time from the filled cache to the first token of the answer."""

    total_s: float
    """Time from the question to the first token, including all of the above."""

    put_back: int
    """Committed blocks of the put after the answer."""

    put_outcome: str
    """Counts of the put's blocks by state, for people; empty without a put."""


class AnswersReport(Report, frozen=True):
    """Report of an answer to every question."""

    questions: tuple[Question, ...]
    hits_from_dram: int
    """Blocks served from the agent's memory since its start."""


class RecomputeReport(Report, frozen=True):
    """Report of a recomputed document."""

    prefill_s: float
    first_token_s: tuple[float, ...]
    """For each question, time from the computed cache to the first token of the answer."""


class ComparisonReport(Report, frozen=True):
    """Differences between loading and recomputing; empty if all is well."""

    bytes_compared: int
    answers_compared: int
    differences: tuple[str, ...]


class Failed(Report, frozen=True):
    """Report of an error; the worker ends."""

    why: str


AnyOrder = Write | Ask | Recompute | Compare
AnyReport = Ready | WriteReport | AnswersReport | RecomputeReport | ComparisonReport | Failed
