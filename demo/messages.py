"""What the demo tells its worker processes, and what they report: one line of JSON each."""

from dataclasses import dataclass, field

import msgspec

from demo.document import DOCUMENT_TOKENS, ModelSize


@dataclass(frozen=True, slots=True)
class Task:
    """What all workers of one run agree on; a process gets it on its command line."""

    address: str
    tokens: int = DOCUMENT_TOKENS
    model: ModelSize = field(default_factory=ModelSize)


class Order(msgspec.Struct, frozen=True, tag=True):
    """What a worker is to do next."""


class Write(Order, frozen=True):
    """Compute the document's cache and put it, acknowledged when it is committed."""


class Ask(Order, frozen=True):
    """Answer each question as a worker does that has nothing: look up, get, recompute the holes.

    What had to be recomputed is put back once the question is answered.
    """


class Recompute(Order, frozen=True):
    """Compute the document anew and answer each question, without the fabric."""


class Compare(Order, frozen=True):
    """Compare what the last `Ask` loaded and answered with what the last `Recompute` did."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What a worker says when it has done something. Times are wall-clock seconds."""


class Ready(Report, frozen=True):
    """The worker has its model and a connection."""

    transport: str
    """How blocks cross: ``nixl`` or ``inline``."""

    parameters: int
    threads: int
    blocks: int
    block_bytes: int


class Written(Report, frozen=True):
    """The document was computed and put."""

    prefill_s: float
    put_s: float
    outcome: str
    """The states of all blocks, counted for people."""

    committed: int
    shard_blocks: dict[str, int]
    """How many blocks each shard lists, by the shard's name."""


class Question(msgspec.Struct, frozen=True):
    """What one question took, and what became of the document's blocks on the way."""

    listed: int
    """Blocks that lookup called hits."""

    loaded: int
    """Blocks that were got: verified, and in the model's cache."""

    outcome: str
    """The states of all blocks of the get, counted for people."""

    recomputed: int
    """Blocks that were computed, because they or a neighbour in their chunk were not got."""

    lookup_s: float
    load_s: float
    recompute_s: float
    first_token_s: float
    """From the filled cache to the first token of the answer."""

    total_s: float
    """From the question to the first token: all of the above and what lies between."""

    put_back: int
    """Blocks that were put after the answer and are committed."""

    put_outcome: str
    """The states of all blocks that were put back, counted for people; empty when none was."""


class Asked(Report, frozen=True):
    """Every question was answered once."""

    questions: tuple[Question, ...]
    hits_from_dram: int
    """Blocks that the agent has served from its own memory since it started."""


class Recomputed(Report, frozen=True):
    """The document was computed anew."""

    prefill_s: float
    first_token_s: tuple[float, ...]
    """For each question, from the computed cache to the first token of the answer."""


class Compared(Report, frozen=True):
    """What differed between loading and recomputing; nothing, if all is well."""

    bytes_compared: int
    answers_compared: int
    differences: tuple[str, ...]


class Failed(Report, frozen=True):
    """The worker met an error and ends."""

    why: str


AnyOrder = Write | Ask | Recompute | Compare
AnyReport = Ready | Written | Asked | Recomputed | Compared | Failed
