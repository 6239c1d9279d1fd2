"""KV hints of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca.connectors.vllm.core.hints import RequestHints, parse_hints


@dataclass(frozen=True)
class Action:
    action_type: str
    payload: Any
    action_version: Any = "1.0"


def retain(*directives: object) -> Action:
    return Action("kv.retain", {"scope": None, "directives": list(directives)})


@pytest.mark.parametrize(
    ("action", "hints"),
    [
        (Action("kv.prefetch", {}), RequestHints(has_prefetch=True)),
        (Action("kv.prefetch", {}, "1.7"), RequestHints(has_prefetch=True)),
        (Action("kv.prefetch", {}, "2.0"), RequestHints()),
        (Action("kv.deref", {}), RequestHints(is_session_end=True)),
        (Action("kv.fetch", {"sources": []}), RequestHints()),
        (retain({"priority": 50, "start": 0, "end": 64, "duration": 30}), RequestHints(ttl_s=30)),
        (
            retain({"priority": 50, "duration": 30}, {"priority": 9, "duration": 60.5}),
            RequestHints(ttl_s=60.5),
        ),
        (retain({"priority": 50, "duration": 30}, {"priority": 0, "duration": 60}), RequestHints(ttl_s=30)),
        (retain({"priority": 50, "duration": 30}, {"priority": 9}), RequestHints()),
        (retain({"priority": 50, "duration": 0}), RequestHints()),
        (retain({"priority": 50, "duration": 10**400}), RequestHints()),
        (retain(), RequestHints()),
    ],
)
def test_each_known_action_has_its_meaning(action: Action, hints: RequestHints) -> None:
    assert parse_hints([action]) == hints


def test_the_actions_of_a_request_add_up() -> None:
    actions = [Action("kv.deref", {}), Action("kv.new", {}), retain({"priority": 1, "duration": 5})]
    assert parse_hints(actions) == RequestHints(ttl_s=5, is_session_end=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["directives", "priority", "duration", "x"]), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["directives", "scope"]), JSON))
def test_no_payload_fails_a_request(payload: dict[str, Any]) -> None:
    ttl_s = parse_hints([Action("kv.retain", payload)]).ttl_s
    assert ttl_s is None or ttl_s > 0
