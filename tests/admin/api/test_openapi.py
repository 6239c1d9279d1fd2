"""Whatever is sent to the service: no answer is 500, and each is what the service's own OpenAPI says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance, unsupported_method
from tests.admin.service import TOKENS, AdminService

from ostraca_admin.api.app import build_app
from ostraca_admin.api.context import Context

EXAMPLES = 30
UNASKED = [
    unsupported_method,  # TRACE and the like, which uvicorn answers by itself
    positive_data_acceptance,  # what is well-formed may still name no NQN, or an ETag of yesterday
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminService]:
    with AdminService(tmp_path_factory.mktemp("admin")) as service:
        service.onboarded("shelf-1")
        yield service


OPERATIONS = {
    operation.label: operation
    for found in schemathesis.openapi.from_dict(
        build_app(cast("Context", None), version="0").openapi()
    ).get_all_operations()
    if isinstance(found, Ok) and (operation := found.ok()).path != "/v1/events"
}
"""Everything that can be asked for but the stream of events, which does not end."""


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_no_request_is_answered_with_500_nor_with_anything_unsaid(service: AdminService, label: str) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=OPERATIONS[label].as_strategy())
    def sends(case: Case[Any]) -> None:
        case.call_and_validate(
            base_url=service.url,
            headers={"Authorization": f"Bearer {TOKENS['admin']}"},
            excluded_checks=UNASKED,
        )

    sends()


def test_a_body_that_is_too_long_is_not_read_to_its_end(service: AdminService, tmp_path: Path) -> None:
    answer = service.ask("PUT", "/v1/enclosures/shelf-2", b" " * (65 << 10))
    assert (answer.status, answer.headers["content-type"]) == (413, "application/problem+json")
