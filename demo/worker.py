"""Worker process with the document and the model, without a KV cache between questions.

``python -m demo.worker TASK`` (a ``messages.Task`` as JSON) reads orders from stdin and writes reports to
stdout, a line each, until the end of stdin.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from transformers import LlamaForCausalLM

import ostraca
from demo.connector import SharedDocument
from demo.document import ANSWER_TOKENS, QUESTIONS, document
from demo.messages import (
    AnswersReport,
    AnyOrder,
    Ask,
    Compare,
    ComparisonReport,
    Failed,
    Question,
    Ready,
    Recompute,
    RecomputeReport,
    Report,
    Task,
    Write,
    WriteReport,
)
from demo.model import (
    CHUNK_TOKENS,
    Answer,
    build_model,
    continue_from,
    fix_arithmetic,
    kv_shape,
    prefill,
)
from demo.paging import KvCache, block_digest

_QUESTION_TOKENS_MAX = max(map(len, QUESTIONS))


@dataclass(frozen=True, slots=True)
class CacheDigest:
    """Digests and answers of a filled cache, for comparison without the cache."""

    digests: tuple[bytes, ...]
    answer: Answer


class Worker:
    """Engine: a model, a document, and an empty cache for each question."""

    def __init__(self, task: Task, client: ostraca.Client) -> None:
        self._threads = fix_arithmetic()
        self._client = client
        self._tokens = document(task.tokens)
        self._model: LlamaForCausalLM = build_model(task.model)
        self._shape = kv_shape(self._model)
        self._document = SharedDocument(client, self._tokens, self._model)
        self._loaded: list[CacheDigest] = []
        self._recomputed: list[CacheDigest] = []
        # A first call costs more than later ones: threads start, code is loaded. It is no fair measure.
        prefill(self._model, self._tokens[:CHUNK_TOKENS], self._empty())

    def ready(self) -> Ready:
        """Describe this worker."""
        return Ready(
            transport=self._client.transport,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            threads=self._threads,
            blocks=len(self._document.pages),
            block_bytes=self._shape.block_bytes,
        )

    def execute(self, order: AnyOrder) -> Report:
        """Execute an order."""
        match order:
            case Write():
                return self._write()
            case Ask():
                return self._ask()
            case Recompute():
                return self._recompute()
            case Compare():
                return self._compare()

    def _empty(self) -> KvCache:
        """Return an empty cache with mapped memory."""
        room = len(self._tokens) + _QUESTION_TOKENS_MAX + ANSWER_TOKENS
        return KvCache(self._shape, tokens_max=room)

    def _write(self) -> WriteReport:
        cache = self._empty()
        began_s = time.perf_counter()
        prefill(self._model, self._tokens, cache)
        computed_s = time.perf_counter()
        results = self._document.store(cache, self._document.pages)
        put_s = time.perf_counter() - computed_s
        shards = self._client.status().shards
        return WriteReport(
            prefill_s=computed_s - began_s,
            put_s=put_s,
            outcome=_outcomes(results),
            committed=_committed(results),
            shard_blocks={shard.shard: shard.blocks for shard in shards},
        )

    def _ask(self) -> AnswersReport:
        self._loaded.clear()
        questions = tuple(map(self._answer, QUESTIONS))
        return AnswersReport(questions, hits_from_dram=self._client.status().counters.get_hits_from_cache)

    def _answer(self, text: str) -> Question:
        """Answer a question from an empty cache, then put the missing pages.

        The clock runs from the question to the first token, because later work delays no user.
        """
        cache = self._empty()
        asked_s = time.perf_counter()
        chain = self._document.chain()
        found = self._document.lookup(chain)
        found_s = time.perf_counter()
        cache.resize(len(self._tokens))
        got = self._document.load(chain, cache)
        got_s = time.perf_counter()
        present = set(self._document.pages).difference(got.holes)
        recomputed = prefill(self._model, self._tokens, cache, present=present)
        filled_s = time.perf_counter()
        answer = continue_from(self._model, cache, text)
        self._loaded.append(CacheDigest(self._digests(cache), answer))
        put = self._document.store(cache, recomputed)
        return Question(
            listed=found.hits,
            loaded=got.hits,
            outcome=repr(got),
            recomputed=len(recomputed),
            lookup_s=found_s - asked_s,
            load_s=got_s - found_s,
            recompute_s=filled_s - got_s,
            first_token_s=answer.first_token_s,
            total_s=filled_s - asked_s + answer.first_token_s,
            put_back=_committed(put),
            put_outcome=_outcomes(put),
        )

    def _recompute(self) -> RecomputeReport:
        cache = self._empty()
        began_s = time.perf_counter()
        prefill(self._model, self._tokens, cache)
        prefill_s = time.perf_counter() - began_s
        digests = self._digests(cache)
        self._recomputed = [
            CacheDigest(digests, continue_from(self._model, cache, text)) for text in QUESTIONS
        ]
        first_token_s = tuple(filled.answer.first_token_s for filled in self._recomputed)
        return RecomputeReport(prefill_s=prefill_s, first_token_s=first_token_s)

    def _digests(self, cache: KvCache) -> tuple[bytes, ...]:
        return tuple(map(block_digest, cache.blocks(self._document.pages)))

    def _compare(self) -> ComparisonReport:
        pairs = list(zip(self._loaded, self._recomputed, strict=True))
        return ComparisonReport(
            bytes_compared=len(pairs) * len(self._document.pages) * self._shape.block_bytes,
            answers_compared=len(pairs),
            differences=tuple(
                f"question {number}: {difference}"
                for number, (loaded, recomputed) in enumerate(pairs, 1)
                for difference in differences(loaded, recomputed)
            ),
        )


def differences(loaded: CacheDigest, recomputed: CacheDigest) -> list[str]:
    """Return a sentence for each difference; empty if equal bit for bit."""
    found = []
    both = zip(loaded.digests, recomputed.digests, strict=True)
    unequal = [page for page, (one, other) in enumerate(both) if one != other]
    if unequal:
        found.append(f"the bytes of {len(unequal)} blocks differ, the first of them block {unequal[0]}")
    one, other = loaded.answer, recomputed.answer
    if one.tokens != other.tokens:
        found.append(f"the answer is {bytes(one.tokens)!r}, and after recomputing {bytes(other.tokens)!r}")
    elif not one.is_equal(other):
        apart = (one.logits - other.logits).abs().max().item()
        found.append(f"the tokens are equal, but their logits differ, by up to {apart:.3g}")
    return found


def _committed(results: Sequence[ostraca.PutResult]) -> int:
    return sum(result.states.count(ostraca.PutState.COMMITTED) for result in results)


def _outcomes(results: Sequence[ostraca.PutResult]) -> str:
    return "; ".join(map(repr, results))


def main() -> int:
    """Serve orders until the end of stdin; return the exit code."""
    # Ctrl-C reaches every process of the terminal; the parent decides what it means, and closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = msgspec.json.decode(sys.argv[1], type=Task)
    # Libraries that print must not get in between the reports.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as reports:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def say(report: Report) -> None:
            reports.write(msgspec.json.encode(report) + b"\n")

        try:
            with ostraca.connect(task.address) as client:
                worker = Worker(task, client)
                say(worker.ready())
                for line in sys.stdin.buffer:
                    say(worker.execute(msgspec.json.decode(line, type=AnyOrder)))
        except Exception as error:  # noqa: BLE001 (the parent shows it, and this process is over)
            traceback.print_exc()
            say(Failed(f"{type(error).__name__}: {error}"))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
