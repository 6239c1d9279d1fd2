"""Generated workloads of chat sessions, for users without a trace.

Sessions arrive as a Poisson process. Each session begins with a *system prompt*, with a popularity by Zipf's
law, and has a geometric number of turns. A turn appends a user's message to the conversation and requests an
answer; exponential think times separate the turns. Lengths of system prompts, messages and answers are
lognormal. A session ends early at the longest context.

A block is 512 tokens of a prompt, counted from its beginning. Full blocks are equal in every turn of a
session. Full blocks of a system prompt are equal in all sessions with the same prompt. The last, partial
block of a prompt is unique to its request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import count

import numpy as np

from ostraca_cli.tools.replay.trace import TOKENS_PER_BLOCK, Request
from ostraca_fabric.errors import UsageError, shown

_LENGTH_SIGMA = 1.0
"""Sigma of every lognormal length: mean 1.65 times the median; 1 % are above six times the mean."""

_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of a workload; means are those of the distributions above."""

    sessions: int = 2000
    sessions_per_s: float = 1.0
    turns: float = 4.0
    """Mean number of turns of a session, at least 1."""

    think_s: float = 60.0
    """Mean time between two turns."""

    system_prompts: int = 50
    zipf: float = 1.0
    """Exponent s: popularity of the n-th system prompt is n to the power of -s; 0 makes all equal."""

    system_tokens: float = 2048.0
    message_tokens: float = 1024.0
    answer_tokens: float = 384.0
    context_tokens_max: int = 131_072
    seed: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError for values out of bounds and for oversized workloads."""
        for field in fields(self):
            value, (least, most) = getattr(self, field.name), BOUNDS[field.name]
            if not least <= value <= most:
                raise UsageError(
                    f"{field.name}={str(value)[:_SHOWN_MAX]} can't be made: take {least:g} to {most:g}"
                )
        if self.blocks_about > _BLOCKS_MAX:
            raise UsageError(
                f"the workload has about {self.blocks_about:.0e} blocks, and the limit is "
                f"{_BLOCKS_MAX:.0e}: take fewer sessions, turns or tokens"
            )

    @property
    def blocks_about(self) -> float:
        """Return the approximate number of blocks of system prompts and requests."""
        turn_tokens = self.message_tokens + self.answer_tokens
        turns = min(self.turns, 1 + self.context_tokens_max / turn_tokens)
        tokens = min(self.context_tokens_max, self.system_tokens + turns * turn_tokens)
        return (self.sessions * turns * tokens + self.system_prompts * self.system_tokens) / TOKENS_PER_BLOCK


_SHOWN_MAX = 32
_BLOCKS_MAX = 5e7
"""About 2 GB of Python integers."""

BOUNDS: dict[str, tuple[float, float]] = {
    "sessions": (1, 10**8),
    "sessions_per_s": (1e-6, 1e6),
    "turns": (1.0, 1e6),
    "think_s": (1e-3, 1e8),
    "system_prompts": (1, 10**6),
    "zipf": (0.0, 100.0),
    "system_tokens": (1e-3, 1e9),
    "message_tokens": (1e-3, 1e9),
    "answer_tokens": (1e-3, 1e9),
    "context_tokens_max": (TOKENS_PER_BLOCK, 10**9),
    "seed": (0, (1 << 64) - 1),
}
"""Minimum and maximum of each field."""


def parse_recipe(text: str) -> Recipe:
    """Parse ``sessions=100,turns=3``; absent fields keep defaults. Raises UsageError."""
    usual = Recipe()
    kinds = {field.name: type(getattr(usual, field.name)) for field in fields(Recipe)}
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        kind = kinds.get(name)
        if kind is None:
            raise UsageError(f"{shown(name)} is no parameter of a workload: take any of {', '.join(kinds)}")
        try:
            given[name] = kind(value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(
                f"{name}={shown(value)}: write {wanted}, as in {name}={getattr(usual, name)}"
            ) from error
    return Recipe(**given)  # type: ignore[arg-type]  # each of its own kind, checked above


def generate(recipe: Recipe) -> list[Request]:
    """Generate requests in order of time, equal for equal recipes."""
    dice = np.random.default_rng(recipe.seed)
    numbers = count()
    prompts = [
        [next(numbers) for _ in range(tokens // TOKENS_PER_BLOCK)]
        for tokens in _lengths(dice, recipe.system_tokens, recipe.system_prompts)
    ]
    popularity = np.arange(1, recipe.system_prompts + 1, dtype=np.float64) ** -recipe.zipf
    chosen = dice.choice(recipe.system_prompts, recipe.sessions, p=popularity / popularity.sum())
    begins_s = np.cumsum(dice.exponential(1 / recipe.sessions_per_s, recipe.sessions))
    made = [
        request
        for begin_s, prompt in zip(begins_s.tolist(), chosen.tolist(), strict=True)
        for request in _session(recipe, dice, begin_s, prompts[prompt], numbers)
    ]
    return sorted(made, key=lambda request: request.timestamp)


def _session(
    recipe: Recipe, dice: np.random.Generator, begin_s: float, prompt: list[int], numbers: count[int]
) -> list[Request]:
    # Each turn takes a token at least, so no turns beyond the context are drawn.
    turns = min(int(dice.geometric(1 / recipe.turns)), recipe.context_tokens_max)
    messages = _lengths(dice, recipe.message_tokens, turns)
    answers = _lengths(dice, recipe.answer_tokens, turns)
    waits_s = dice.exponential(recipe.think_s, turns)
    whole, tokens, now_s = list(prompt), len(prompt) * TOKENS_PER_BLOCK, begin_s
    requests: list[Request] = []
    for message, answer, wait_s in zip(messages, answers, waits_s.tolist(), strict=True):
        tokens += message
        if tokens > recipe.context_tokens_max:
            break
        whole += [next(numbers) for _ in range(tokens // TOKENS_PER_BLOCK - len(whole))]
        last = [next(numbers)] if tokens % TOKENS_PER_BLOCK else []
        requests.append(Request(round(now_s * _MS_PER_S), tokens, answer, whole + last))
        tokens += answer
        now_s += wait_s
    return requests


def _lengths(dice: np.random.Generator, mean: float, size: int) -> list[int]:
    """Draw lognormal lengths with this mean, each at least a token."""
    drawn = dice.lognormal(np.log(mean) - _LENGTH_SIGMA**2 / 2, _LENGTH_SIGMA, size)
    return [int(value) for value in np.maximum(1, np.rint(drawn)).tolist()]
