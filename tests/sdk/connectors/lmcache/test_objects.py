"""Names, layouts and blocks of LMCache's objects, and the plug-in's settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sdk.connectors.lmcache.server_steps import LAYOUT, names

from ostraca.connectors.lmcache.objects import LayoutTable, ObjectLayout, block_hashes, blocks_of, run_of
from ostraca.connectors.lmcache.settings import LmcacheSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX

(NAME,) = names(1)


def test_every_fact_of_an_object_changes_all_of_its_hashes() -> None:
    variants = [
        (NAME, LAYOUT),
        (NAME._replace(chunk_hash=b"other"), LAYOUT),
        (NAME._replace(model_name="other"), LAYOUT),
        (NAME._replace(kv_rank=2), LAYOUT),
        (NAME._replace(object_group_id=1), LAYOUT),
        (NAME._replace(cache_salt="other"), LAYOUT),
        (NAME, LAYOUT._replace(size_bytes=LAYOUT.size_bytes - 1)),
        (NAME, LAYOUT._replace(form="[([2], 'torch.float16')]")),
    ]
    hashes = [each for name, layout in variants for each in block_hashes(name, layout, 1 << 16)]
    hashes += block_hashes(NAME, LAYOUT, 1 << 17)
    assert len(set(hashes)) == len(hashes) == 8 * 3 + 2
    assert block_hashes(NAME, LAYOUT, 1 << 16) == block_hashes(*variants[0], 1 << 16)


@given(size_bytes=st.integers(0, 300), block_bytes=st.integers(1, 100))
def test_blocks_cover_an_object_once_and_have_a_hash_each(size_bytes: int, block_bytes: int) -> None:
    memory = np.arange(size_bytes, dtype=np.uint64).astype(np.uint8)
    blocks = blocks_of(memory, block_bytes)
    assert b"".join(block.tobytes() for block in blocks) == memory.tobytes()
    assert all(1 <= len(block) <= block_bytes for block in blocks)
    hashes = block_hashes(NAME, ObjectLayout(size_bytes, ""), block_bytes)
    assert len(hashes) == len(blocks)
    assert [key for run in run_of(hashes) for key in run.keys] == hashes


def test_the_layout_last_seen_counts_and_the_oldest_family_leaves_first() -> None:
    table = LayoutTable(entries_max=2)
    first, second, third = (NAME._replace(kv_rank=rank) for rank in range(3))
    table.learn(first, LAYOUT)
    table.learn(second, LAYOUT)
    table.learn(first, other := ObjectLayout(1, "other"))
    assert table.layout_of(first._replace(chunk_hash=b"another chunk")) == other
    table.learn(third, LAYOUT)
    assert [table.layout_of(each) for each in (first, second, third)] == [other, None, LAYOUT]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"lookup_deadline": 1},
            "plug-in of LMCache has no setting 'lookup_deadline'; did you mean lookup_deadli",
        ),
        ({"block_bytes": 0}, "block_bytes is 0: give a value from 1"),
        ({"block_bytes": BLOCK_BYTES_MAX + 1}, "block_bytes is"),
        ({"break_even_tokens": 1}, "break_even_tokens has no effect"),
        ({"prefill_tokens_per_s": 1.0}, "prefill_tokens_per_s has no effect"),
        ({"pin_s": -1}, "pin_s is -1"),
        ({"start_wait_s": 10_000}, "start_wait_s is 10000.0: give at most 3600"),
        ({"agents": "http://host"}, "http://host"),
    ],
)
def test_a_wrong_setting_is_refused_with_advice(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LmcacheSettings.of(config)


def test_revision_weights_and_block_size_have_layouts_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_bytes(b"1")
    changes: list[dict[str, object]] = [
        {},
        {"revision": "2"},
        {"weights_file": str(file)},
        {"block_bytes": 1 << 16},
    ]
    digests = {LmcacheSettings.of(each).layout().digest() for each in changes}
    assert len(digests) == len(changes)
    assert LmcacheSettings.of({"pin_s": 1.0}).layout() == LmcacheSettings().layout()


def test_an_engines_extra_config_holds_the_settings_beside_keys_of_others() -> None:
    config: dict[str, object] = {
        "storage_plugin.ostraca.class_name": "OstracaStorageBackend",
        "storage_plugin.ostraca.module_path": "ostraca.connectors.lmcache",
        "storage_plugin.other.module_path": "other.plugin",
        "storage_plugin.other.tenant": "of the other plug-in",
        "tenant": "of others",
        "dax.device_path": "/dev/dax0.0",
        "ostraca.agents": "unix:///agent.sock",
        "ostraca.pin_s": 1,
    }
    assert LmcacheSettings.of_extra_config(config) == LmcacheSettings(agents=("unix:///agent.sock",), pin_s=1)
    assert LmcacheSettings.of_extra_config(None) == LmcacheSettings()
    with pytest.raises(UsageError, match="did you mean pin_s"):
        LmcacheSettings.of_extra_config({"ostraca.pins": 1})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"ostraca": {"agents": "unix:///agent.sock"}},
            "has a key 'ostraca': write each setting as ostraca.NAME",
        ),
        ({"ostraca": None}, "has a key 'ostraca'"),
        (
            {"storage_plugin.pod.module_path": "ostraca.connectors.lmcache", "storage_plugin.pod.pin_s": 1},
            "storage_plugin.pod.pin_s of extra_config has no effect: write ostraca.pin_s",
        ),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LmcacheSettings.of_extra_config(config)
