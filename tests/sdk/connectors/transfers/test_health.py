"""Backoff from a fabric without answers."""

from __future__ import annotations

from ostraca.connectors.transfers.health import FabricHealth, RequestBackoff
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca_fabric.model.outcome import Reason


def test_a_pause_doubles_with_each_failure_in_a_row_and_ends_with_a_success() -> None:
    backoff = RequestBackoff(first_s=1.0, longest_s=3.0, late_requests_max=2)
    backoff.record_failure(0.0)
    backoff.record_failure(0.5)
    assert (backoff.is_active(0.9), backoff.is_active(1.0)) == (True, False)
    backoff.record_failure(1.0)
    assert (backoff.is_active(2.9), backoff.is_active(3.0)) == (True, False)
    backoff.record_failure(3.0)
    assert (backoff.is_active(5.9), backoff.is_active(6.0)) == (True, False)
    backoff.record_failure(6.0)
    backoff.record_success()
    assert not backoff.is_active(6.0)
    backoff.record_failure(7.0)
    assert (backoff.is_active(7.9), backoff.is_active(8.0)) == (True, False)


def test_one_late_answer_begins_no_pause_and_two_in_a_row_do() -> None:
    backoff = RequestBackoff(first_s=1.0, longest_s=3.0, late_requests_max=2)
    backoff.record_late(0.0)
    assert not backoff.is_active(0.0)
    backoff.record_success()
    backoff.record_late(1.0)
    assert not backoff.is_active(1.0)
    backoff.record_late(1.1)
    assert backoff.is_active(1.1)


def test_full_flash_refuses_stores_and_not_loads() -> None:
    health = FabricHealth(ConnectorSettings(), is_linked=lambda: True, clock_s=lambda: 0.0)
    health.record_write(bytes([Reason.NO_SPACE, Reason.QUOTA]))
    assert (health.read_refusal, health.write_refusal) == ("", "backoff")
    health.record_write(bytes([Reason.NO_SPACE, Reason.NONE]))
    assert health.write_refusal == ""
    health.record_read(bytes([Reason.DISCONNECTED]))
    assert (health.read_refusal, health.write_refusal) == ("backoff", "")


def test_without_a_link_everything_is_refused() -> None:
    health = FabricHealth(ConnectorSettings(), is_linked=lambda: False, clock_s=lambda: 0.0)
    assert health.read_refusal == health.write_refusal == "no_fabric"
