"""The reference page lists every setting of an agent as the code has it."""

from tests.docs.settings_page import PAGE, page_with, tables


def test_the_page_is_what_the_settings_say_of_themselves() -> None:
    assert PAGE.read_text() == page_with(tables()), "run: python -m tests.docs.settings_page"
