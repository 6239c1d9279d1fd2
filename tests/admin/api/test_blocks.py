"""Where a block belongs, and prefetching for a router: what the admin service makes of what agents say."""

from __future__ import annotations

from typing import Any

import pytest
from tests.admin.agents import Agent
from tests.admin.cli.commands import Commands
from tests.admin.service import AdminService

from ostraca_fabric.errors import RefusedError
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.volume import Layout, VolumeRecord

VOLUME = VolumeRecord(
    TenantId("acme"), "llama", Layout(model="m", dtype="bf16", page_tokens=16, hash_bytes=16), 1 << 20
)
HASHES = [number.to_bytes(16, "big").hex() for number in range(1, 41)]
PLACE = f"/v1/placement?tenant=acme&volume=llama&hash={HASHES[1]}&root={HASHES[0]}"
PREFETCH = "/v1/prefetch"


@pytest.fixture
def first(service: AdminService) -> Agent:
    """Return the agent asked first if any will do, in a fabric with a volume."""
    service.do(service.membership.create_volume(VOLUME))
    return service.agents[AgentId("agent-0")]


def form(**values: object) -> dict[str, object]:
    chains = [{"engine_hashes": HASHES[:3]}]
    return {"tenant": "acme", "volume": "llama", "agent": "agent-0", "chains": chains, **values}


def test_where_a_block_belongs_is_told_for_each_placement_epoch(
    service: AdminService, first: Agent, ostraca: Commands
) -> None:
    told = service.ask("GET", PLACE, role="viewer")
    assert (told.status, told.body) == (
        200,
        {
            "agent": "agent-0",
            "map_revision": 17,
            "places": [
                {
                    "placement_epoch": 2,
                    "enclosure": "shelf-1",
                    "shard": "shelf-1/d0/0",
                    "owner": "agent-0",
                    "owner_epoch": 7,
                },
                {"placement_epoch": 1, "enclosure": "", "shard": "", "owner": "", "owner_epoch": 0},
            ],
        },
    )
    first.is_silent = True
    assert service.ask("GET", PLACE).body["agent"] == "agent-1", "any agent will do"
    ran = ostraca("fabric", "place", "acme/llama", HASHES[1], "--root", HASHES[0])
    assert [line.split() for line in ran.out.splitlines()[1:]] == [
        ["2", "shelf-1", "shelf-1/d0/0", "agent-0", "7"],
        ["1", "none", "–", "–", "–"],
    ]
    json = ostraca("fabric", "place", "acme/llama", HASHES[1], "--rank", "3", "--json").json
    assert json == service.ask("GET", PLACE).body
    assert ostraca("fabric", "place", "acme/llama", "xyz").code == 2
    assert ostraca("fabric", "place", "acme/nothing", HASHES[1]).code == 1


def test_who_can_not_be_told_is_told_why(service: AdminService, first: Agent) -> None:
    assert service.ask("GET", PLACE, role="").status == 401
    assert service.ask("GET", PLACE.replace("llama", "qwen")).status == 404
    for bad in (PLACE + "00", PLACE + "0", PLACE + "&rank=-1", PLACE + "&group=4294967296"):
        assert service.ask("GET", bad).status == 422, bad
    for agent in service.agents.values():
        agent.is_older = True
    older = service.ask("GET", PLACE)
    assert (older.status, "upgrade the agent" in older.body["detail"]) == (409, True)
    first.is_older = False
    first.refuses = RefusedError("unknown_volume", "there is no volume 'llama'")
    assert service.ask("GET", PLACE).status == 409
    for agent in service.agents.values():
        agent.is_silent = True
    away = service.ask("GET", PLACE)
    assert (away.status, away.headers["Retry-After"]) == (503, "2")
    assert "can't reach an agent at agent-1" in away.body["detail"]


def test_a_prefetch_is_handed_to_the_agent_that_is_named(service: AdminService, first: Agent) -> None:
    chains = [
        {"engine_hashes": HASHES[:3], "rank": 1},
        {"engine_hashes": HASHES[:34], "depth": 64, "group": 2},
    ]
    answer = service.ask("POST", PREFETCH, form(chains=chains, deadline_s=0.5), role="operator")
    assert answer.status == 200, answer
    ((volume, spans, deadline_s),) = first.prefetched
    assert (volume, deadline_s) == (VOLUME, 0.5)
    assert [(len(span), span.rank, span.group, span.depth) for span in spans] == [
        (3, 1, 0, 0),
        (34, 0, 2, 64),
    ]
    assert spans[1].units.hex() == HASHES[0] + HASHES[32], "each stripe unit by its own first hash"
    assert answer.body["agent"] == "agent-0"
    assert answer.body["counts"] == [
        {"state": "HIT", "reason": "NONE", "blocks": 18},
        {"state": "MISS", "reason": "NOT_FOUND", "blocks": 19},
    ]
    short, long = answer.body["chains"]
    assert short == {"states": ["MISS", "HIT", "MISS"], "reasons": ["NOT_FOUND", "NONE", "NOT_FOUND"]}
    assert len(long["states"]) == len(long["reasons"]) == 34
    assert service.ask("GET", "/v1/audit").body["items"] == []


def test_a_prefetch_from_the_command_line_says_how_many_came(ostraca: Commands, first: Agent) -> None:
    asked = ("fabric", "prefetch", "acme/llama", "agent-0", *HASHES[:3])
    ran = ostraca(*asked, "--rank", "1", "--deadline", "0.5")
    assert (ran.code, ran.err, ran.out) == (0, "", "1 HIT\n2 MISS (NOT_FOUND)\n")
    ((_, (span,), deadline_s),) = first.prefetched
    assert (len(span), span.rank, span.group, deadline_s) == (3, 1, 0, 0.5)
    assert ostraca(*asked, "--json").json["counts"][0] == {"state": "HIT", "reason": "NONE", "blocks": 1}
    assert ostraca("fabric", "prefetch", "acme/llama", "agent-7", HASHES[0]).code == 1
    assert ostraca("fabric", "prefetch", "acme/llama", "agent-0", "xyz").code == 2


def test_a_prefetch_that_can_not_be_is_refused_with_why(service: AdminService, first: Agent) -> None:
    def asked(role: str = "operator", **values: object) -> int:
        return service.ask("POST", PREFETCH, form(**values), role=role).status

    assert (asked("viewer"), asked("")) == (403, 401)
    assert (asked(agent="agent-7"), asked(volume="qwen"), asked(tenant="zeta")) == (404, 404, 404)
    many = [{"engine_hashes": HASHES[:1], "rank": rank} for rank in range(257)]
    unmeant: tuple[dict[str, Any], ...] = (
        {"chains": []},
        {"chains": [{"engine_hashes": []}]},
        {"chains": [{"engine_hashes": ["00" * 17]}]},
        {"chains": [{"engine_hashes": ["zz" * 16]}]},
        {"chains": [{"engine_hashes": HASHES[:1], "depth": 33}]},
        {"chains": many},
        {"deadline_s": 0},
        {"deadline_s": 61},
    )
    for bad in unmeant:
        assert asked(**bad) == 422, bad
    for agent, status in (("agent-0", 503), ("agent-1", 409)):
        service.agents[AgentId(agent)].refuses = RefusedError(
            "overloaded" if status == 503 else "usage", "not now"
        )
        assert asked(agent=agent) == status
    assert first.prefetched == []
    first.is_silent = True
    assert asked() == 503
    first.is_silent, first.is_older = False, True
    assert asked() == 409


def test_more_blocks_than_an_agent_takes_are_refused_here(
    service: AdminService, first: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraca_admin.api.routes.blocks.BLOCKS_MAX", 5)
    chains = [{"engine_hashes": HASHES[:3], "rank": rank} for rank in range(2)]
    refused = service.ask("POST", PREFETCH, form(chains=chains))
    assert (refused.status, refused.body["detail"]) == (
        422,
        "6 blocks in a prefetch exceed the limit: send at most 5",
    )
    assert first.prefetched == []
