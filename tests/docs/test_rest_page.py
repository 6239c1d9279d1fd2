"""The reference page lists every path of the admin service as it says itself."""

from tests.docs.rest_page import PAGE, page


def test_the_page_is_what_the_service_says_of_itself() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.docs.rest_page"
