"""What is planned, by values and by properties.

Applied to a model of a target, it leads to what is wanted, and never lets anybody see what he is not to see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import example, given
from hypothesis import strategies as st

from ostraca_enclosure.plan import (
    NOTHING,
    AddListener,
    AddNamespace,
    AllowAnyHost,
    AllowHost,
    CreateSubsystem,
    DenyHost,
    Export,
    ExportedNamespace,
    HostSecrets,
    PresentExports,
    RemoveListener,
    RemoveNamespace,
    RemoveSubsystem,
    RequireAllowList,
    Step,
    WantedExports,
    plan,
)
from ostraca_fabric.model.target import Controller, TargetTransport, parse_controller

A, B = parse_controller("rdma://10.0.8.1:4420"), parse_controller("tcp://10.0.9.1:4420")
ALICE, BOB = "nqn.2025-01.io.ostraca:alice", "nqn.2025-01.io.ostraca:bob"
ONE, TWO = Export("1" * 32, "/dev/nvme1n1"), Export("2" * 32, "/dev/nvme2n1")


def test_first_export_admits_hosts_before_drives_and_listens_last() -> None:
    want = WantedExports((A, B), frozenset({TWO, ONE}), {BOB: HostSecrets("b"), ALICE: HostSecrets("a")})
    assert plan(want, PresentExports()) == [
        CreateSubsystem(),
        AllowHost(ALICE, HostSecrets("a")),
        AllowHost(BOB, HostSecrets("b")),
        AddNamespace(ONE),
        AddNamespace(TWO),
        AddListener(A),
        AddListener(B),
    ]


def test_open_subsystem_admits_hosts_after_its_drives() -> None:
    assert plan(WantedExports((A,), frozenset({ONE})), PresentExports()) == [
        CreateSubsystem(),
        AddNamespace(ONE),
        AllowAnyHost(),
        AddListener(A),
    ]


def test_correct_state_needs_no_steps() -> None:
    have = PresentExports(
        exists=True,
        controllers=frozenset({A}),
        namespaces=(ExportedNamespace(3, ONE.nguid, ONE.device),),
        hosts=frozenset({ALICE}),
    )
    assert plan(WantedExports((A,), frozenset({ONE}), {ALICE: HostSecrets()}), have) == []


def test_removals_precede_additions() -> None:
    have = PresentExports(
        exists=True,
        controllers=frozenset({A}),
        namespaces=(
            ExportedNamespace(1, ONE.nguid, ONE.device),
            ExportedNamespace(2, TWO.nguid, TWO.device, is_enabled=False),
        ),
        hosts=frozenset({ALICE}),
        stale_hosts=frozenset(),
    )
    assert plan(WantedExports((B,), frozenset({TWO}), {BOB: HostSecrets()}), have) == [
        RemoveListener(A),
        RemoveNamespace(1, ONE.nguid),
        RemoveNamespace(2, TWO.nguid),
        AllowHost(BOB),
        DenyHost(ALICE),
        AddNamespace(TWO),
        AddListener(B),
    ]


def test_open_subsystem_is_closed_before_hosts_are_listed() -> None:
    have = PresentExports(exists=True, controllers=frozenset({A}), allows_any_host=True)
    want = WantedExports((A,), frozenset(), {ALICE: HostSecrets()})
    assert plan(want, have) == [RequireAllowList(), AllowHost(ALICE)]


def test_duplicate_namespace_is_withdrawn_once() -> None:
    have = PresentExports(
        exists=True,
        controllers=frozenset({A}),
        namespaces=(ExportedNamespace(1, ONE.nguid, ONE.device), ExportedNamespace(5, ONE.nguid, ONE.device)),
        allows_any_host=True,
    )
    assert plan(WantedExports((A,), frozenset({ONE})), have) == [RemoveNamespace(5, ONE.nguid)]


@dataclass
class Model:
    """A target that keeps to nvmet's rules."""

    have: PresentExports = field(default_factory=PresentExports)
    secrets: dict[str, HostSecrets] = field(default_factory=dict)

    def observe(self, hosts: dict[str, HostSecrets]) -> PresentExports:
        stale_hosts = {
            host for host in self.have.hosts if host in hosts and self.secrets[host] != hosts[host]
        }
        return replace(self.have, stale_hosts=frozenset(stale_hosts))

    def apply(self, step: Step) -> None:  # noqa: C901 (a case for each step)
        have = self.have
        assert have.exists or isinstance(step, CreateSubsystem), step
        match step:
            case CreateSubsystem():
                have = replace(have, exists=True)
            case RequireAllowList():
                have = replace(have, allows_any_host=False)
            case AllowAnyHost():
                assert not have.hosts, "nvmet refuses it while hosts are listed"
                have = replace(have, allows_any_host=True)
            case AllowHost(host, secrets):
                assert not have.allows_any_host, "nvmet refuses it while every host may connect"
                self.secrets[host] = secrets
                have = replace(have, hosts=have.hosts | {host})
            case DenyHost(host):
                have = replace(have, hosts=have.hosts - {host})
            case AddNamespace(export):
                free = min(set(range(1, 99)) - {each.slot for each in have.namespaces})
                have = replace(
                    have, namespaces=(*have.namespaces, ExportedNamespace(free, export.nguid, export.device))
                )
            case RemoveNamespace(slot):
                have = replace(have, namespaces=tuple(each for each in have.namespaces if each.slot != slot))
            case AddListener(controller):
                have = replace(have, controllers=have.controllers | {controller})
            case RemoveListener(controller):
                have = replace(have, controllers=have.controllers - {controller})
            case RemoveSubsystem():
                assert have == PresentExports(exists=True, allows_any_host=have.allows_any_host), (
                    "nvmet refuses it: busy"
                )
                have = PresentExports()
        self.have = have

    def seen_by(self, host: str) -> frozenset[str]:
        """Return which drives a host can see."""
        is_in = self.have.allows_any_host or host in self.have.hosts
        shown = frozenset(each.nguid for each in self.have.namespaces if each.is_enabled)
        return shown if is_in and self.have.controllers else frozenset()


_HOSTS = st.dictionaries(st.sampled_from([ALICE, BOB]), st.sampled_from([HostSecrets("x"), HostSecrets("y")]))
_EXPORTS = st.frozensets(
    st.builds(Export, st.sampled_from(["1" * 32, "2" * 32, "3" * 32]), st.just("/dev/x")), max_size=3
)
_WANTS = st.builds(
    WantedExports,
    st.lists(st.sampled_from([A, B]), unique=True, min_size=1, max_size=2).map(tuple),
    _EXPORTS,
    _HOSTS,
) | st.just(NOTHING)


_ALICE_SEES_ONE = WantedExports((A,), frozenset({ONE}), {ALICE: HostSecrets("x")})
_BOB_SEES_TWO = WantedExports((A,), frozenset({TWO}), {BOB: HostSecrets("x")})


@given(st.lists(_WANTS, min_size=1, max_size=4), st.data())
def test_any_interrupted_sequence_ends_as_wanted(wants: list[WantedExports], data: st.DataObject) -> None:
    model = Model()
    for want in wants:
        steps = plan(want, model.observe(dict(want.hosts)))
        for step in steps[: data.draw(st.integers(0, len(steps)))]:
            model.apply(step)
    for step in plan(wants[-1], model.observe(dict(wants[-1].hosts))):
        model.apply(step)
    assert plan(wants[-1], model.observe(dict(wants[-1].hosts))) == []


@example(_ALICE_SEES_ONE, _BOB_SEES_TWO)
@example(_ALICE_SEES_ONE, WantedExports((A,), frozenset({TWO})))
@example(WantedExports((A,), frozenset({ONE})), _BOB_SEES_TWO)
@given(_WANTS, _WANTS)
def test_no_step_shows_a_host_a_drive_outside_its_rights(before: WantedExports, after: WantedExports) -> None:
    model, aim = Model(), Model()
    for target, want in ((model, before), (aim, after)):
        for step in plan(want, target.observe(dict(want.hosts))):
            target.apply(step)
    hosts = (ALICE, BOB, "nqn.2025-01.io.ostraca:stranger")
    first = {host: model.seen_by(host) for host in hosts}
    last = {host: aim.seen_by(host) for host in hosts}
    for step in plan(after, model.observe(dict(after.hosts))):
        model.apply(step)
        for host in hosts:
            assert model.seen_by(host) <= first[host] | last[host], f"{host} after: {step}"


def test_files_are_a_controller_like_any_other() -> None:
    files = Controller(TargetTransport.FILES, "/srv/shelf")
    assert plan(WantedExports((files,)), PresentExports()) == [
        CreateSubsystem(),
        AllowAnyHost(),
        AddListener(files),
    ]
