"""Mistakes made on purpose in what tenants, volumes and workers share: keys, tags, limits, chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.fabric.world import blocks, worker
from tests.simulation.mutants.mistakes import _change

from ostraca.results import BlockOutcomes
from ostraca_dpu_agent import volumes
from ostraca_dpu_agent.datapath import queries
from ostraca_dpu_agent.datapath.data_path import DataPath
from ostraca_dpu_agent.datapath.requests import blocks as request_blocks
from ostraca_dpu_agent.datapath.requests.context import RequestContext
from ostraca_dpu_agent.datapath.staging.staging import Staging
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.tables.digests import derive_keys, tag_seeds, volume_secret

# ------------------------------------------------------------------------------------------- between tenants


def volumes_are_known_by_their_names_alone() -> None:
    serve = volumes.Volumes._serve

    def remembered(self: volumes.Volumes, found: Any) -> Any:
        return vars(self).setdefault("_by_name", {}).setdefault(found.name, serve(self, found))

    _change(volumes.Volumes, "_serve", remembered)


def keys_say_nothing_of_the_tenant() -> None:
    anybody = TenantId("anybody")
    _change(volumes, "volume_secret", lambda key, *, tenant, **of: volume_secret(key, tenant=anybody, **of))


def keys_are_remembered_by_their_hashes_alone() -> None:
    kept = dict[Any, Any]()

    def remembered(secret: bytes, spans: Any) -> Any:
        return kept.setdefault(tuple(span.hashes for span in spans), derive_keys(secret, spans))

    for each in (request_blocks, queries):
        _change(each, "derive_keys", remembered)


def neither_keys_nor_tags_of_gets_tell_tenants_apart() -> None:
    get, anybody = DataPath.get, TenantId("anybody")
    first: dict[str, Any] = {}

    async def reaching(self: DataPath, its: Any, volume: Any, wanted: Any) -> Any:
        other = first.setdefault(volume.record.name, volume)
        theirs = replace(volume, secret=other.secret, placement_secret=other.placement_secret)
        return await get(self, its, theirs, wanted)

    _change(DataPath, "get", reaching)
    for each in (request_blocks, worker, blocks):
        _change(each, "tag_seeds", lambda its, *of: tag_seeds(replace(its, tenant=anybody), *of))


# ----------------------------------------------------------------------------------------------- of limits


def more_requests_are_served_than_may_be() -> None:
    _change(RequestContext, "has_room_for", lambda self, tenant: True)


def puts_take_all_of_staging() -> None:
    _change(Staging, "put_bytes_max", property(lambda self: self._settings.staging_bytes))


def one_worker_takes_all_of_staging() -> None:
    _change(Staging, "_is_at_its_share", lambda self, waiter: False)


# ------------------------------------------------------------------------------------------------ of chains


def a_part_of_a_chain_is_placed_by_its_own_beginning() -> None:
    def span_of_a_part(chain: Chain) -> Any:
        part = replace(chain, hashes=chain.hashes[chain.start * chain.hash_bytes :], start=0, stop=len(chain))
        return span(part)

    span = Chain.span
    _change(Chain, "span", lambda chain: span_of_a_part(chain) if chain.is_chained else span(chain))


def a_prefix_goes_on_behind_a_hole() -> None:
    _change(BlockOutcomes, "prefix", BlockOutcomes.hits)
