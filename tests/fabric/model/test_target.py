"""Controllers and targets as people write them."""

from __future__ import annotations

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.target import (
    Controller,
    Target,
    TargetTransport,
    check_nguid,
    check_nqn,
    parse_controller,
)

NQN = "nqn.2025-01.io.ostraca:shelf-1"
RDMA = Controller(TargetTransport.RDMA, "10.0.8.1", 4420)
TCP = Controller(TargetTransport.TCP, "fd00::8", 4421)
FILES = Controller(TargetTransport.FILES, "/srv/shelf-1")


@pytest.mark.parametrize("controller", [RDMA, TCP, FILES], ids=str)
def test_a_controller_is_read_as_it_is_written(controller: Controller) -> None:
    assert parse_controller(str(controller)) == controller


def test_the_port_is_that_of_nvme_over_fabrics_unless_another_is_named() -> None:
    assert parse_controller("rdma://10.0.8.1") == RDMA
    assert parse_controller("rdma://[10.0.8.1]:4420") == RDMA
    assert parse_controller("tcp://[fd00::8]") == Controller(TargetTransport.TCP, "fd00::8", 4420)


@pytest.mark.parametrize(
    "text",
    [
        "10.0.8.1:4420",
        "fc://10.0.8.1:4420",
        "tcp://",
        "tcp://:4420",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:x",
        "tcp://host:4420:1",
        "tcp://a b:1",
        "tcp://[fd00::8]x",
        "files://relative",
        "files:///",
        "files:///a/../b",
    ],
)
def test_what_names_no_controller_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(UsageError, match="write"):
        parse_controller(text)


@pytest.mark.parametrize(
    "nqn", ["", "shelf-1", "nqn.25-01.io.ostraca:x", f"nqn.2025-01.io:{'x' * 223}", f"{NQN}\n"]
)
def test_what_is_no_qualified_name_is_refused(nqn: str) -> None:
    with pytest.raises(UsageError, match="qualified name"):
        check_nqn(nqn)


@pytest.mark.parametrize("nguid", ["", "0" * 32, "A" * 32, "1" * 31, "g" * 32])
def test_what_identifies_no_namespace_is_refused(nguid: str) -> None:
    with pytest.raises(UsageError, match="NGUID"):
        check_nguid(nguid)


@pytest.mark.parametrize(
    ("controllers", "says"),
    [((), "1 to 8"), ((RDMA, RDMA), "twice"), ((RDMA, FILES), "not both"), ((TCP,) * 9, "1 to 8")],
)
def test_a_target_has_some_controllers_of_one_kind(controllers: tuple[Controller, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Target(NQN, controllers)
    assert Target(NQN, (RDMA, TCP)).is_files is False
    assert Target(NQN, (FILES,)).is_files
