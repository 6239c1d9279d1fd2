"""The reference pages list every setting as the code has it."""

from tests.docs.settings_page import (
    ADMIN_PAGE,
    AGENT_PAGE,
    DAEMON_PAGE,
    ENCLOSURE_PAGE,
    LIVE_PAGE,
    TUNED_FIRST,
    admin_tables,
    agent_page,
    daemon_tables,
    enclosure_tables,
    live_table,
    page_with,
)


def test_the_pages_are_what_the_settings_say_of_themselves() -> None:
    hint = "run: python -m tests.docs.settings_page"
    assert AGENT_PAGE.read_text() == agent_page(), hint
    assert DAEMON_PAGE.read_text() == page_with(DAEMON_PAGE, daemon_tables()), hint
    assert ADMIN_PAGE.read_text() == page_with(ADMIN_PAGE, admin_tables()), hint
    assert ENCLOSURE_PAGE.read_text() == page_with(ENCLOSURE_PAGE, enclosure_tables()), hint
    assert LIVE_PAGE.read_text() == page_with(LIVE_PAGE, live_table()), hint


def test_the_agents_page_begins_with_the_settings_to_tune_first() -> None:
    sections = AGENT_PAGE.read_text().split("\n## ")
    assert sections[1].startswith("Tune first\n")
    assert all(f"\n| `{name}` |" in sections[1] for name in TUNED_FIRST)
