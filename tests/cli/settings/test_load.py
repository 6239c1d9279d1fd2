"""Settings from defaults, a file, the environment and flags, and messages about invalid settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_cli.settings import Loaded, SettingsError, Sources, as_toml, load
from ostraca_cli.settings.fields import Unit, field_docs, group_of, value_of
from ostraca_cli.settings.load import AGENT_PREFIX, variable
from ostraca_cli.settings.values import read_value, write_value
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import UsageError


@dataclass(frozen=True, slots=True)
class Inner:
    """What lies within."""

    hold_s: float = 30.0
    """How long.

    And why."""

    keepalive_s: int = 10
    """Whole seconds."""

    frame_bytes_max: int = 4 << 20
    """Longest frame."""

    bytes_s: float = 20e6
    """A rate."""


@dataclass(frozen=True, slots=True)
class Outer:
    """Everything there is."""

    blocks_max: int = 64
    """Most blocks."""

    put_share: float = 0.5
    """A part."""

    is_on: bool = True
    """Whether."""

    address: str = "here"
    """Where."""

    tags: tuple[str, ...] = ("a",)
    """Which."""

    inner: Inner = field(default_factory=Inner)
    """Documented by its class."""

    def __post_init__(self) -> None:
        if self.blocks_max == 13:
            message = "blocks_max is 13: take another"
            raise UsageError(message)


def loaded(
    directory: Path, toml: str = "", environment: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> Loaded[Outer]:
    file = directory / "given.toml"
    file.write_text(toml)
    return load(Outer, Sources(file, environment or {}, flags), prefix="X_")


def problems(
    directory: Path, toml: str = "", environment: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        loaded(directory, toml, environment, flags)
    return tuple(each.replace(f"{directory}/", "") for each in caught.value.problems)


def test_nothing_given_gives_the_defaults() -> None:
    assert load(AgentSettings, Sources(), prefix=AGENT_PREFIX) == Loaded(AgentSettings(), {})


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        'blocks_max = 1\naddress = "file"\n[inner]\nhold_s = 1\n',
        {"X_INNER_HOLD_S": "2", "X_ADDRESS": "environment", "Y_BLOCKS_MAX": "9"},
        ("inner.hold_s=3",),
    )
    assert found.settings == Outer(blocks_max=1, address="environment", inner=Inner(hold_s=3.0))
    assert found.origins == {
        "blocks_max": f"{tmp_path}/given.toml",
        "address": "X_ADDRESS",
        "inner.hold_s": "--set",
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("inner.hold_s", "200ms", 0.2),
        ("inner.hold_s", "6h", 21600.0),
        ("inner.hold_s", " 1.5 ", 1.5),
        ("inner.hold_s", "1e-3", 0.001),
        ("inner.keepalive_s", "2min", 120),
        ("inner.frame_bytes_max", "64MiB", 64 << 20),
        ("inner.frame_bytes_max", "4096", 4096),
        ("inner.bytes_s", "20MB", 20e6),
        ("inner.bytes_s", "2e7", 20e6),
        ("blocks_max", "1_000", 1000),
        ("put_share", "0.25", 0.25),
        ("is_on", "False", False),
        ("tags", "a, b,", ("a", "b")),
        ("address", "200ms", "200ms"),
    ],
)
def test_values_are_written_with_their_units(tmp_path: Path, name: str, text: str, value: object) -> None:
    found = value_of(loaded(tmp_path, flags=(f"{name}={text}",)).settings, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "toml", "how"),
    [
        ("inner.hold_s", '"20 parsecs"', "write seconds, or a number with a unit"),
        ("inner.hold_s", "-1", "write seconds"),
        ("inner.hold_s", "nan", "write seconds"),
        ("inner.hold_s", "true", "write seconds"),
        ("inner.keepalive_s", "0.5", "write whole seconds"),
        ("inner.keepalive_s", '"500ms"', "write whole seconds"),
        ("inner.frame_bytes_max", '"64MoB"', "write bytes, or a number with a unit"),
        ("inner.bytes_s", "[]", "write bytes a second"),
        ("blocks_max", "1.5", "write a whole number"),
        ("blocks_max", '"1e400"', "write a whole number"),
        ("blocks_max", '"64MiB"', "write a whole number"),
        ("put_share", '"half"', "write a part of 1"),
        ("is_on", "1", "write true or false"),
        ("address", "7", "write a text"),
        ("tags", '["a", 7]', "write a list of texts"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_how_to_write_it(
    tmp_path: Path, name: str, toml: str, how: str
) -> None:
    (problem,) = problems(tmp_path, f"{name} = {toml}\n")
    assert problem.startswith(f"given.toml: {name}: ")
    assert how in problem


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    assert problems(
        tmp_path,
        "blocks_min = 1\n[inner]\nhold = 1\n[iner]\nhold_s = 1\n",
        {"X_INNER_HOLDS_S": "1"},
        ("inner.hold=1", "hold_s=1", "qqq=1", "blocks_max"),
    ) == (
        "given.toml: there is no setting blocks_min; the nearest is blocks_max",
        "given.toml: there is no setting inner.hold; the nearest is inner.hold_s",
        "given.toml: there is no setting iner; the nearest is inner",
        "the environment's X_INNER_HOLDS_S is no setting; the nearest is X_INNER_HOLD_S",
        "--set inner.hold=1: there is no setting inner.hold; the nearest is inner.hold_s",
        "--set hold_s=1: there is no setting hold_s; the nearest is inner.hold_s",
        "--set qqq=1: there is no setting qqq",
        "--set blocks_max: write name=value, as in --set owner.hold_s=20",
    )


def test_all_that_is_wrong_is_told_at_once_also_what_the_settings_say_themselves(tmp_path: Path) -> None:
    toml = "blocks_max = 13\ninner = 4\n"
    assert problems(tmp_path, toml, {"X_IS_ON": "perhaps"}) == (
        "given.toml: inner is a group of settings, and not 4",
        "X_IS_ON: is_on: the value 'perhaps' is invalid: write true or false",
        "blocks_max is 13: take another",
    )


def test_several_problems_are_a_line_each_and_one_is_the_sentence_itself() -> None:
    assert str(SettingsError(["a"])) == "a"
    assert str(SettingsError(["a", "b"])) == "2 settings problems:\n  a\n  b"


def test_a_group_of_the_agents_that_cannot_work_says_which(tmp_path: Path) -> None:
    flags = ("health.suspect_faults=0", "owner.blocks_per_shard_max=1")
    with pytest.raises(SettingsError) as caught:
        load(AgentSettings, Sources(flags=flags), prefix=AGENT_PREFIX)
    first, second = caught.value.problems
    assert first.startswith("owner: owner.blocks_per_shard_max is 1: ")
    assert second.startswith("health: suspect_faults is 0")


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    for content, said in (
        (b"blocks_max", "not TOML"),
        (b"\xff", "not TOML"),
        (b"#" * (2 << 20), "longer than"),
    ):
        (tmp_path / "given.toml").write_bytes(content)
        with pytest.raises(SettingsError, match=said):
            load(Outer, Sources(tmp_path / "given.toml"), prefix="X_")
    with pytest.raises(SettingsError, match="the settings can't be read"):
        load(Outer, Sources(tmp_path / "none.toml"), prefix="X_")


def test_docstrings_are_read_off_the_class() -> None:
    assert field_docs(Inner)["hold_s"] == "How long. And why."
    assert group_of(Outer).groups[0].doc == "What lies within."


def test_every_setting_of_an_agent_is_documented_and_has_a_variable_of_its_own() -> None:
    settings = group_of(AgentSettings).all_settings()
    assert [setting.name for setting in settings if not setting.doc] == []
    variables = [variable(AGENT_PREFIX, setting) for setting in settings]
    assert "OSTRACA_AGENT_OWNER_HOLD_S" in variables
    assert len(set(variables)) == len(variables)


def test_written_settings_read_back_the_same(tmp_path: Path) -> None:
    given = ("inner.hold_s=0.25", "tags=x,y", "is_on=false", 'address=a "b" \\', "inner.frame_bytes_max=5000")
    first = loaded(tmp_path, flags=given)
    written = as_toml(first.settings, first.origins)
    assert "# From --set; the default is 30.0.\nhold_s = 0.25\n" in written
    assert "\n[inner]\n# What lies within.\n" in written
    assert loaded(tmp_path, written).settings == first.settings
    agent = AgentSettings(turn_s=0.5, drain_s=1e-7)
    (tmp_path / "agent.toml").write_text(as_toml(agent, {}))
    assert load(AgentSettings, Sources(tmp_path / "agent.toml"), prefix=AGENT_PREFIX).settings == agent


NUMBERS = [setting for setting in group_of(AgentSettings).all_settings() if setting.type in (int, float)]


@given(st.sampled_from(NUMBERS), st.integers(0, 1 << 62), st.floats(0, 1e18))
def test_any_number_reads_back_as_it_was_written(setting: object, whole: int, real: float) -> None:
    assert setting in NUMBERS
    chosen = NUMBERS[NUMBERS.index(setting)]
    value = whole if chosen.type is int else real
    written = write_value(chosen, value)
    assert read_value(chosen, written.strip('"')) == value


def test_names_say_what_numbers_count() -> None:
    units = {setting.name: setting.unit for setting in group_of(AgentSettings).all_settings()}
    assert units["owner.hold_s"] is Unit.SECONDS
    assert units["requests.frame_bytes_max"] is Unit.BYTES
    assert units["owner.scrub.bytes_s"] is Unit.BYTES_PER_SECOND
    assert units["memory.put_share"] is Unit.SHARE
    assert units["requests.blocks_max"] is Unit.NONE
