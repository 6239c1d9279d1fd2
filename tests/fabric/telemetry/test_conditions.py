"""Since when a condition is as it is."""

from ostraca_fabric.telemetry.conditions import READY, Condition, Conditions, Observation, is_ready

GOOD = Observation("drives_good", is_true=True, sentence="Unhealthy drives: none.")
BAD = Observation("drives_good", is_true=False, sentence="Unhealthy drives: one.")
WORSE = Observation("drives_good", is_true=False, sentence="Unhealthy drives: two.")


def test_a_condition_is_told_with_how_long_it_has_been_so_whatever_its_sentence() -> None:
    conditions = Conditions()
    assert conditions.after(10.0, [GOOD]) == (Condition("drives_good", True, 0.0, GOOD.sentence),)
    assert conditions.after(12.0, [GOOD]) == (Condition("drives_good", True, 2.0, GOOD.sentence),)
    assert conditions.after(15.0, [BAD]) == (Condition("drives_good", False, 0.0, BAD.sentence),)
    assert conditions.after(16.5, [WORSE]) == (Condition("drives_good", False, 1.5, WORSE.sentence),)
    assert conditions.after(17.0, [GOOD])[0].since_s == 0.0


def test_each_condition_has_a_time_of_its_own() -> None:
    conditions, ready = Conditions(), Observation(READY, is_true=True, sentence="Ready: serving gets.")
    conditions.after(1.0, [ready, GOOD])
    found = conditions.after(3.0, [ready, BAD])
    assert [(each.name, each.since_s) for each in found] == [(READY, 2.0), ("drives_good", 0.0)]


def test_ready_alone_says_whether_work_can_be_sent() -> None:
    assert is_ready([Condition(READY, True, 0.0, ""), Condition("drives_good", False, 0.0, "")])
    assert not is_ready([Condition(READY, False, 0.0, ""), Condition("drives_good", True, 0.0, "")])
    assert not is_ready([])
