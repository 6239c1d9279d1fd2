from __future__ import annotations

import logging

import pytest

from ostraca_fabric.spells import REMIND_S, Spell


def test_a_trouble_is_said_when_it_begins_once_a_minute_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    spell = Spell(logging.getLogger("spells"), lambda: now_s)
    caplog.set_level(logging.INFO, "spells")
    spell.over("it is well")
    for second in range(150):
        now_s = 100.0 + second
        spell.goes_on("no answer from %s", "etcd", since_s=98.0)
    assert spell.lasts_s == 151.0
    spell.over("it is well")
    spell.over("it is well")
    assert REMIND_S == 60
    assert caplog.messages == [
        "no answer from etcd",
        "no answer from etcd; so for 62 s now",
        "no answer from etcd; so for 122 s now",
        "it is well, after 151.0 s",
    ]
    assert spell.lasts_s == 0


def test_another_trouble_than_the_one_said_last_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    spell = Spell(logging.getLogger("spells"), lambda: 7.0)
    caplog.set_level(logging.DEBUG, "spells")
    for message in ("it is silent", "it is silent", "it has lost all"):
        spell.goes_on(message)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "it is silent"),
        ("DEBUG", "it is silent"),
        ("WARNING", "it has lost all; so for 0 s now"),
    ]
