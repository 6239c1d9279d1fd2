from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ostraca_fabric.errors import AuthenticationError, ConnectError, ProtocolError, VersionError
from ostraca_fabric.model.ids import AgentId, StartId, TenantId
from ostraca_fabric.wire.handshake import (
    AGENT,
    DEFAULT_LIMITS,
    MEMORY,
    OPERATOR,
    OVERFLOW_UID,
    WORKER,
    Access,
    AgentHandshake,
    accepted,
    hello_for,
)
from ostraca_fabric.wire.messages import AgentMemory, ArenaOffer, Hello, Refused, Welcome, WorkerMemory

OWN_UID, OTHER_UID = 1000, 1001
START = StartId(bytes(range(16)))
ACCESS = Access(
    own_uid=OWN_UID,
    tenant_tokens={TenantId("red"): ("red-1", "red-2"), TenantId("blue"): ("blue-1",)},
    tenant_uids={TenantId("blue"): frozenset({OTHER_UID})},
    fabric_tokens=("fabric-1",),
)
END = AgentHandshake(AgentId("a1"), START, ACCESS, features=("waves", "pins"), transports=("nixl", "inline"))


def hello(role: str = WORKER, tenant: str = "red", token: str = "", **more: object) -> Hello:
    return msgspec.structs.replace(hello_for(role, tenant, "test", token), **more)


def code_of(answer: Welcome | Refused) -> str:
    return answer.code if isinstance(answer, Refused) else "welcome"


def test_a_welcome_says_what_both_ends_can_do() -> None:
    offers = (ArenaOffer("quantum", 1, 1), ArenaOffer("inline", 1, 1), ArenaOffer("nixl", 1, 1))
    answer = END.answer(hello(features=("pins", "magic"), arenas=offers), OWN_UID)
    assert answer == Welcome(1, "a1", START, ("pins",), DEFAULT_LIMITS, "inline")


@pytest.mark.parametrize(
    ("role", "tenant", "token", "uid", "code"),
    [
        (WORKER, "red", "", OWN_UID, "welcome"),
        (WORKER, "nobody-heard-of-it", "", OWN_UID, "welcome"),
        (WORKER, "red", "", 0, "welcome"),
        (WORKER, "red", "", OTHER_UID, "authentication"),
        (WORKER, "blue", "", OTHER_UID, "welcome"),
        (WORKER, "red", "", OVERFLOW_UID, "authentication"),
        (WORKER, "red", "", None, "authentication"),
        (WORKER, "red", "red-1", None, "welcome"),
        (WORKER, "red", "red-2", OTHER_UID, "welcome"),
        (WORKER, "red", "blue-1", None, "authentication"),
        (WORKER, "blue", "red-1", None, "authentication"),
        (WORKER, "red", "fabric-1", None, "authentication"),
        (WORKER, "green", "red-1", None, "authentication"),
        (WORKER, "red", "wrong", OWN_UID, "authentication"),
        (AGENT, "", "", OWN_UID, "welcome"),
        (AGENT, "", "", OTHER_UID, "authentication"),
        (AGENT, "", "fabric-1", None, "welcome"),
        (AGENT, "", "red-1", None, "authentication"),
        (OPERATOR, "", "fabric-1", None, "welcome"),
        (OPERATOR, "", "", None, "authentication"),
        (OPERATOR, "", "", OTHER_UID, "authentication"),
        (WORKER, "", "", OWN_UID, "protocol"),
        (WORKER, "../red", "", OWN_UID, "protocol"),
        (OPERATOR, "red", "", OWN_UID, "protocol"),
        ("king", "red", "", OWN_UID, "protocol"),
    ],
)
def test_who_may_speak_for_whom(role: str, tenant: str, token: str, uid: int | None, code: str) -> None:
    assert code_of(END.answer(hello(role, tenant, token), uid)) == code


@pytest.mark.parametrize(
    ("features", "uid", "token", "is_shown"),
    [
        ((MEMORY,), OWN_UID, "", True),
        ((MEMORY,), 0, "red-1", True),
        ((), OWN_UID, "", False),
        ((MEMORY,), OTHER_UID, "red-1", False),
        ((MEMORY,), None, "red-1", False),
    ],
)
def test_memory_is_shown_to_users_who_can_read_it_anyway(
    features: tuple[str, ...], uid: int | None, token: str, *, is_shown: bool
) -> None:
    memory = AgentMemory(4096, 8192, 64, bytes(16))
    end = replace(END, memory=memory, features=(MEMORY,))
    asked = hello(token=token, features=features)
    answer = end.answer(asked, uid)
    assert isinstance(answer, Welcome)
    assert answer.memory == (memory if is_shown else None)
    assert accepted(asked, answer) == answer
    wary = replace(end, access=replace(END.access, own_user_is_trusted=False))
    answer = wary.answer(hello(token="red-1", features=features), uid)
    assert isinstance(answer, Welcome)
    assert answer.memory is None


@pytest.mark.parametrize(
    ("change", "uid", "is_read"),
    [
        ({}, OWN_UID, True),
        ({"token": "red-1"}, 0, True),
        ({"features": ()}, OWN_UID, True),
        ({"memory": None}, OWN_UID, False),
        ({"token": "red-1"}, OTHER_UID, False),
        ({"token": "red-1"}, None, False),
        ({"role": AGENT, "tenant": ""}, OWN_UID, False),
        ({"role": OPERATOR, "tenant": ""}, OWN_UID, False),
    ],
    ids=str,
)
def test_the_memory_of_workers_that_could_read_the_agents_is_read_if_they_offer_it(
    change: dict[str, object], uid: int | None, *, is_read: bool
) -> None:
    end = replace(END, memory=AgentMemory(4096, 8192, 64, bytes(16)), features=(MEMORY,))
    asked = msgspec.structs.replace(hello(features=(MEMORY,), memory=WorkerMemory(64, bytes(16))), **change)
    answer = end.answer(asked, uid)
    assert isinstance(answer, Welcome)
    assert answer.reads_worker is is_read
    assert accepted(asked, answer) == answer


@pytest.mark.parametrize("uid", [OWN_UID, 0, None])
def test_an_agent_that_shows_no_memory_or_trusts_no_user_reads_no_worker(uid: int | None) -> None:
    shows = replace(END, memory=AgentMemory(4096, 8192, 64, bytes(16)), features=(MEMORY,))
    wary = replace(shows, access=replace(shows.access, own_user_is_trusted=False))
    for end in (replace(shows, memory=None), wary):
        answer = end.answer(hello(token="red-1", memory=WorkerMemory(64, bytes(16))), uid)
        assert isinstance(answer, Welcome)
        assert not answer.reads_worker


def test_a_user_of_another_namespace_is_nobody_even_to_an_agent_that_runs_as_nobody() -> None:
    access = Access(OVERFLOW_UID, tenant_uids={TenantId("red"): frozenset({OVERFLOW_UID})})
    assert not access.allows(hello(), OVERFLOW_UID)
    assert access.allows(hello(), 0)


@pytest.mark.parametrize("uid", [OWN_UID, 0])
def test_where_the_own_user_is_not_trusted_it_needs_a_token_like_anyone(uid: int) -> None:
    strict = Access(OWN_UID, ACCESS.tenant_tokens, own_user_is_trusted=False)
    end = AgentHandshake(AgentId("a1"), START, strict)
    assert code_of(end.answer(hello(), uid)) == "authentication"
    assert code_of(end.answer(hello(token="red-1"), uid)) == "welcome"


def test_a_refusal_does_not_tell_whether_the_tenant_exists() -> None:
    known = END.answer(hello(tenant="blue", token="x"), None)
    unknown = END.answer(hello(tenant="grey", token="x"), None)
    assert isinstance(known, Refused)
    assert isinstance(unknown, Refused)
    assert known.message.replace("blue", "grey") == unknown.message


def test_the_newest_version_both_speak_is_chosen() -> None:
    end = AgentHandshake(AgentId("a1"), START, ACCESS, version_oldest=3, version_newest=4)
    chosen = [
        end.answer(hello(version_oldest=oldest, version_newest=newest), OWN_UID)
        for oldest, newest in [(2, 3), (3, 4), (4, 5)]
    ]
    assert [answer.version for answer in chosen if isinstance(answer, Welcome)] == [3, 4, 4]


@pytest.mark.parametrize(
    ("oldest", "newest", "who"), [(1, 2, "upgrade the worker"), (5, 6, "upgrade the agent")]
)
def test_without_a_common_version_the_refusal_says_whom_to_upgrade(
    oldest: int, newest: int, who: str
) -> None:
    end = AgentHandshake(AgentId("a1"), START, ACCESS, version_oldest=3, version_newest=4)
    answer = end.answer(hello(version_oldest=oldest, version_newest=newest), OWN_UID)
    assert isinstance(answer, Refused)
    assert answer.code == "version"
    assert who in answer.message


def test_a_range_of_versions_that_is_upside_down_is_refused() -> None:
    assert code_of(END.answer(hello(version_oldest=1, version_newest=0), OWN_UID)) == "version"


def test_an_arena_that_can_not_be_reached_is_refused() -> None:
    answer = END.answer(hello(arenas=(ArenaOffer("quantum", 1, 1),)), OWN_UID)
    assert isinstance(answer, Refused)
    assert answer.code == "transport"
    assert "quantum" in answer.message


def test_the_other_end_accepts_what_it_was_offered() -> None:
    offer = hello_for(WORKER, "red", "test", features=("pins",), arenas=(ArenaOffer("nixl", 1, 1),))
    answer = END.answer(offer, OWN_UID)
    assert accepted(offer, answer) == answer


@pytest.mark.parametrize(
    ("code", "error"),
    [("authentication", AuthenticationError), ("version", VersionError), ("limit", ConnectError)],
)
def test_a_refusal_becomes_an_error_with_the_agents_words(code: str, error: type[ConnectError]) -> None:
    with pytest.raises(error, match="do this instead") as caught:
        accepted(hello(), Refused(code, "do this instead"))
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"features": ("pins",)},
        {"transport": "nixl"},
        {"limits": msgspec.structs.replace(DEFAULT_LIMITS, inflight_max=0)},
        {"memory": AgentMemory(1, 1, 1, b"")},
        {"reads_worker": True},
    ],
    ids=str,
)
def test_a_welcome_to_something_never_offered_is_not_accepted(change: dict[str, object]) -> None:
    welcome = END.answer(hello(), OWN_UID)
    with pytest.raises(ProtocolError, match="without an offer"):
        accepted(hello(), msgspec.structs.replace(welcome, **change))


@pytest.mark.parametrize(
    ("client", "is_taken"), [(b"", True), (bytes(16), True), (b"short", False)], ids=["none", "16", "5"]
)
def test_a_worker_names_its_client_with_16_bytes_or_not_at_all(client: bytes, is_taken: bool) -> None:
    answer = END.answer(hello(client=client), OWN_UID)
    assert isinstance(answer, Welcome) is is_taken


@pytest.mark.parametrize("odd", ["r" * 200_000, "\n" * 50_000, "worker\nWARNING: all is well"])
@pytest.mark.parametrize("where", ["role", "tenant", "transport"])
def test_a_refusal_is_one_short_line_whatever_was_said(where: str, odd: str) -> None:
    said = {
        "role": hello(role=odd),
        "tenant": hello(tenant=odd),
        "transport": hello(arenas=(ArenaOffer(odd, 1, 1),) * 100),
    }[where]
    for versions in ((1, 1), (7, 8)):
        said = msgspec.structs.replace(said, version_oldest=versions[0], version_newest=versions[1])
        answer = END.answer(said, OWN_UID)
        assert isinstance(answer, Refused)
        assert answer.message.isprintable()
        assert len(answer.message) < 1000
