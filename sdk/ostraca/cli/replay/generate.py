"""Made-up workloads of chat sessions, for those who have no trace.

Sessions begin at the times of a Poisson process. Each begins with one of several *system prompts*, whose
popularity follows Zipf's law, and has a geometric number of turns. A turn adds a user's message to all that
was said before and asks for an answer; the next turn comes after the user has thought, for an exponential
time. Lengths of system prompts, messages and answers are lognormal. A session ends early when it would pass
the longest context.

A block is 512 tokens of a prompt from its beginning. What lies in one block entirely is the same block in
every turn, and a system prompt's whole blocks are the same in all sessions that begin with it; the last,
partly filled block of a prompt is asked for by no other request.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import count

import numpy as np

from ostraca.cli.replay.trace import TOKENS_PER_BLOCK, Request
from ostraca_fabric.errors import UsageError

_LENGTH_SIGMA = 1.0
"""Of every lognormal length: the mean is 1.65 times the median, one in a hundred is over six times it."""

_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make. Means are those of the distributions named above."""

    sessions: int = 2000
    sessions_per_s: float = 1.0
    turns: float = 4.0
    """Turns of a session, in the mean; at least one."""

    think_s: float = 60.0
    """From one turn to the next, in the mean."""

    system_prompts: int = 50
    zipf: float = 1.0
    """The popularity of the n-th system prompt is n to the power of minus this; 0 makes all alike."""

    system_tokens: float = 2048.0
    message_tokens: float = 1024.0
    answer_tokens: float = 384.0
    context_tokens_max: int = 131_072
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what can't be made."""
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST.get(field.name, 0.0)
            if not least <= value < float("inf") or (value == 0 and field.name not in ("zipf", "seed")):
                raise UsageError(f"{field.name}={value} can't be made: take a number above {least:g}")


_LEAST = {"turns": 1.0, "sessions": 1, "system_prompts": 1, "context_tokens_max": TOKENS_PER_BLOCK}


def parse_recipe(text: str) -> Recipe:
    """Read ``sessions=100,turns=3``; what is not named keeps its default. Raises UsageError."""
    usual = Recipe()
    kinds = {field.name: type(getattr(usual, field.name)) for field in fields(Recipe)}
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        kind = kinds.get(name)
        if kind is None:
            raise UsageError(f"{name!r} is nothing to generate by: take any of {', '.join(kinds)}")
        try:
            given[name] = kind(value)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(
                f"{name}={value!r}: write {wanted}, as in {name}={getattr(usual, name)}"
            ) from error
    return Recipe(**given)  # type: ignore[arg-type]  # each of its own kind, checked above


def generate(recipe: Recipe) -> list[Request]:
    """Make requests, in the order of their times: the same for the same recipe."""
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
    turns = int(dice.geometric(1 / recipe.turns))
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


def _lengths(dice: np.random.Generator, mean: float, how_many: int) -> list[int]:
    """Draw lognormal lengths of this mean, each at least one token."""
    drawn = dice.lognormal(np.log(mean) - _LENGTH_SIGMA**2 / 2, _LENGTH_SIGMA, how_many)
    return [int(value) for value in np.maximum(1, np.rint(drawn)).tolist()]
