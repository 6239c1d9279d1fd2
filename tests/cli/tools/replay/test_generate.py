"""Generated workloads: their statistics are as documented."""

import itertools
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from ostraca_cli.tools.replay.generate import BOUNDS, Recipe, generate, parse_recipe
from ostraca_cli.tools.replay.trace import TOKENS_PER_BLOCK, Trace
from ostraca_fabric.errors import UsageError

MANY = Recipe(sessions=3000, turns=3.0, sessions_per_s=2.0, think_s=20.0, zipf=1.0, system_prompts=20)


def test_the_same_recipe_makes_the_same_and_another_seed_another() -> None:
    few = Recipe(sessions=20)
    assert generate(few) == generate(few)
    assert generate(few) != generate(Recipe(sessions=20, seed=2))


def test_arrivals_turns_and_lengths_have_the_means_that_were_asked_for() -> None:
    made = generate(MANY)
    for request in made:
        assert len(request.hash_ids) == -(-request.input_length // TOKENS_PER_BLOCK)
    assert all(earlier.timestamp <= later.timestamp for earlier, later in itertools.pairwise(made))
    assert len(made) / MANY.sessions == pytest.approx(3.0, rel=0.1)
    assert np.mean([request.output_length for request in made]) == pytest.approx(MANY.answer_tokens, rel=0.1)


def test_the_nth_system_prompt_is_chosen_as_often_as_zipf_says() -> None:
    # One turn each, and a message that never fills a block: what a request shares is its system prompt.
    made = generate(
        Recipe(sessions=20_000, turns=1.0, system_prompts=4, zipf=1.0, system_tokens=5000, message_tokens=1)
    )
    chosen = Counter(request.hash_ids[0] for request in made)
    shares = [count / 20_000 for _, count in chosen.most_common(4)]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.015)


def test_a_later_turn_begins_with_what_the_turn_before_filled() -> None:
    made = generate(Recipe(sessions=1, turns=30.0, seed=7))
    assert len(made) > 3
    for before, after in itertools.pairwise(made):
        whole = before.input_length // TOKENS_PER_BLOCK
        assert after.hash_ids[:whole] == before.hash_ids[:whole]
        assert not set(before.hash_ids[whole:]) & set(after.hash_ids)


def test_no_context_is_longer_than_the_longest() -> None:
    made = generate(Recipe(sessions=200, turns=20.0, context_tokens_max=8192))
    assert max(request.input_length for request in made) <= 8192


def test_arrivals_are_as_irregular_as_a_poisson_process() -> None:
    made = generate(Recipe(sessions=5000, turns=1.0, sessions_per_s=2.0))
    gaps_s = np.diff([request.timestamp for request in made]) / 1000
    assert gaps_s.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps_s.std() == pytest.approx(0.5, rel=0.05)


def test_a_recipe_is_read_by_name() -> None:
    assert parse_recipe("") == Recipe()
    assert parse_recipe("sessions=10,zipf=0") == Recipe(sessions=10, zipf=0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trace.jsonl", "'trace.jsonl' is no parameter of a workload: take any of sessions, "),
        ("sessions=many", "sessions='many': write a whole number, as in sessions=2000"),
        ("turns=0.5", "turns=0.5 can't be made"),
        ("think_s=-1", "think_s=-1.0 can't be made"),
        ("think_s=1e300", "think_s=1e+300 can't be made: take 0.001 to 1e+08"),
        ("system_tokens=1e300", "system_tokens=1e+300 can't be made"),
        (f"seed={9**99}", "can't be made: take 0 to 1.84467e+19"),
        (f"sessions={5000 * '9'}", "write a whole number"),
        (
            "sessions=1000000",
            "blocks, and the limit is 5e+07: take fewer sessions, turns or tokens",
        ),
        ("system_prompts=1000000,system_tokens=1e5", "take fewer sessions, turns or tokens"),
        ("sessions_per_s=nan", "sessions_per_s=nan can't be made"),
    ],
)
def test_a_bad_recipe_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_recipe(text)
    assert said in str(refused.value)


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_the_least_and_the_most_of_each_number_is_made_or_refused_at_once(name: str, end: int) -> None:
    few = {"sessions": 2, "system_prompts": 2, "context_tokens_max": 4096} | {name: BOUNDS[name][end]}
    text = ",".join(f"{each}={value}" for each, value in few.items())
    if name == "sessions" and end:
        with pytest.raises(UsageError, match="take fewer sessions"):
            parse_recipe(text)
        return
    made = generate(parse_recipe(text))
    assert np.isfinite(Trace.of(made).times_s).all()
    assert sum(len(request.hash_ids) for request in made) < 1e6
