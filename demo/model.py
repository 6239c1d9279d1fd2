"""Real transformer with random weights, and two ways to an answer.

The model is a Hugging Face Llama of 82 million parameters over bytes, built from a seed, without downloads.
The answers are noise, because the weights are random. But the noise depends on every page of the document,
because the wide weights make attention selective. A zeroed page nearly always changes the answer; a flipped
bit changes the logits, and therefore `Answer` keeps them.

**Equal bit for bit.** Floating-point sums depend on their order, and kernels choose an order by the shapes of
their arguments. So the document is always computed in the same chunks of `CHUNK_TOKENS`, on the same number
of threads. The worker recomputes a missing page by the whole chunk on top of everything before the chunk.
Each chunk is then the same call on the same bits in every process, with the same result. The care is needed:
in chunks of 16, 64, 256 or 512 tokens, the same document has four different sets of bits. Runs with one, two
or three threads have three sets of logits for the same question on the same cache.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo.document import ANSWER_TOKENS, DOCUMENT_TOKENS, PAGE_TOKENS, ModelSize
from demo.paging import KvCache, KvShape

CHUNK_TOKENS = 256
BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question: tokens, their logits, and the time to the first token."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    first_token_s: float

    def is_equal(self, other: "Answer") -> bool:
        """Return whether both answers have equal tokens, from logits equal bit for bit."""
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)


def fix_arithmetic(threads: int | None = None) -> int:
    """Fix the arithmetic of this process; return the number of threads, by default one per core.

    Call the function once, before any computation. Bits are equal only between processes with the same number
    of threads, on machines of the same kind, with the same version of torch.

    Cosines and sines for the rotation of keys and queries come from MKL's vector library, and torch divides
    their computation among threads. The library examines the processor at its first call. In MKL 2024.2, part
    of torch's builds, a thread with its own first call meanwhile gets a kernel of another accuracy, with
    errors up to 1.5e-4, for this call alone (https://github.com/pytorch/pytorch/issues/188792). The first
    chunk of a process would then have other bits than later chunks. So this function calls each of them once,
    on a single number, in a single thread.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(mode=True)
    for function in (torch.cos, torch.sin):
        function(torch.zeros(1))
    return torch.get_num_threads()


def build_model(size: ModelSize | None = None, *, seed: int = 0) -> LlamaForCausalLM:
    """Build the model from its seed, with the same weights in each process."""
    size = size or ModelSize()
    config = LlamaConfig(
        vocab_size=BYTE_VALUES,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=size.head_dim,
        initializer_range=size.weight_spread,
        max_position_embeddings=2 * DOCUMENT_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call, unused-ignore]  # transformers annotates only half of itself
    return model


def kv_shape(model: LlamaForCausalLM) -> KvShape:
    """Return the shape of the model's pages."""
    config = model.config
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    return KvShape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        page_tokens=PAGE_TOKENS,
        dtype=model.dtype,
    )


def prefill(
    model: LlamaForCausalLM, tokens: Sequence[int], cache: KvCache, *, present: Collection[int] = ()
) -> list[int]:
    """Compute the KV of all pages outside `present`; return the computed pages.

    The function skips chunks with all pages present. It computes other chunks as a whole, and overwrites
    their present pages with the same bits. Afterwards exactly `tokens` are filled. An empty `present` means a
    full prefill.
    """
    have = frozenset(present)
    computed: list[int] = []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        pages = range(start // PAGE_TOKENS, -(-(start + len(chunk)) // PAGE_TOKENS))
        if not have.issuperset(pages):
            cache.resize(start)
            _next_logits(model, chunk, cache)
            computed += pages
    cache.resize(len(tokens))
    return computed


def continue_from(
    model: LlamaForCausalLM, cache: KvCache, question: str, *, answer_tokens: int = ANSWER_TOKENS
) -> Answer:
    """Answer a question on top of the cache, greedily; the cache is unchanged afterwards.

    The cache needs room for the question and the answer. `first_token_s` counts from this call.
    """
    began_s = time.perf_counter()
    filled = cache.tokens
    logits = [_next_logits(model, list(question.encode()), cache)]
    tokens = [int(logits[0].argmax())]
    first_token_s = time.perf_counter() - began_s
    while len(tokens) < answer_tokens:
        logits.append(_next_logits(model, tokens[-1:], cache))
        tokens.append(int(logits[-1].argmax()))
    cache.resize(filled)
    return Answer(tuple(tokens), torch.stack(logits), first_token_s)


@torch.no_grad()
def _next_logits(model: LlamaForCausalLM, tokens: Sequence[int], cache: KvCache) -> torch.Tensor:
    """Append tokens to the cache; return the logits of the next token, for each byte value."""
    out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = out.logits
    return logits[0, -1]
