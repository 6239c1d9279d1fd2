"""What is planned, by values and by properties: applied to a model of a target, it leads to what is wanted,
and never lets anybody see what he is not to see.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import example, given
from hypothesis import strategies as st

from ostraca_enclosure.plan import (
    NOTHING,
    CloseToOthers,
    Create,
    Export,
    Have,
    HostSecrets,
    LetIn,
    Listen,
    Offer,
    Offered,
    OpenToAll,
    Remove,
    ShutOut,
    Step,
    StopListening,
    TakeBack,
    Want,
    plan,
)
from ostraca_fabric.target import Controller, Transport, parse_controller

A, B = parse_controller("rdma://10.0.8.1:4420"), parse_controller("tcp://10.0.9.1:4420")
ALICE, BOB = "nqn.2025-01.io.ostraca:alice", "nqn.2025-01.io.ostraca:bob"
ONE, TWO = Export("1" * 32, "/dev/nvme1n1"), Export("2" * 32, "/dev/nvme2n1")


def test_a_first_export_lets_hosts_in_before_drives_are_shown_and_listens_last() -> None:
    want = Want((A, B), frozenset({TWO, ONE}), {BOB: HostSecrets("b"), ALICE: HostSecrets("a")})
    assert plan(want, Have()) == [
        Create(),
        LetIn(ALICE, HostSecrets("a")),
        LetIn(BOB, HostSecrets("b")),
        Offer(ONE),
        Offer(TWO),
        Listen(A),
        Listen(B),
    ]


def test_without_hosts_it_is_opened_once_its_drives_are_there() -> None:
    assert plan(Want((A,), frozenset({ONE})), Have()) == [Create(), Offer(ONE), OpenToAll(), Listen(A)]


def test_what_is_as_it_should_be_is_left_alone() -> None:
    have = Have(
        is_there=True,
        controllers=frozenset({A}),
        offered=(Offered(3, ONE.nguid, ONE.device),),
        hosts=frozenset({ALICE}),
    )
    assert plan(Want((A,), frozenset({ONE}), {ALICE: HostSecrets()}), have) == []


def test_removals_come_before_what_is_new() -> None:
    have = Have(
        is_there=True,
        controllers=frozenset({A}),
        offered=(Offered(1, ONE.nguid, ONE.device), Offered(2, TWO.nguid, TWO.device, is_whole=False)),
        hosts=frozenset({ALICE}),
        stale=frozenset(),
    )
    assert plan(Want((B,), frozenset({TWO}), {BOB: HostSecrets()}), have) == [
        StopListening(A),
        TakeBack(1, ONE.nguid),
        TakeBack(2, TWO.nguid),
        LetIn(BOB),
        ShutOut(ALICE),
        Offer(TWO),
        Listen(B),
    ]


def test_a_subsystem_that_is_open_is_closed_before_hosts_are_listed() -> None:
    have = Have(is_there=True, controllers=frozenset({A}), is_open=True)
    want = Want((A,), frozenset(), {ALICE: HostSecrets()})
    assert plan(want, have) == [CloseToOthers(), LetIn(ALICE)]


def test_a_namespace_that_is_there_twice_is_taken_back_once() -> None:
    have = Have(
        is_there=True,
        controllers=frozenset({A}),
        offered=(Offered(1, ONE.nguid, ONE.device), Offered(5, ONE.nguid, ONE.device)),
        is_open=True,
    )
    assert plan(Want((A,), frozenset({ONE})), have) == [TakeBack(5, ONE.nguid)]


@dataclass
class Model:
    """A target that keeps to nvmet's rules."""

    have: Have = field(default_factory=Have)
    secrets: dict[str, HostSecrets] = field(default_factory=dict)

    def observe(self, hosts: dict[str, HostSecrets]) -> Have:
        stale = {host for host in self.have.hosts if host in hosts and self.secrets[host] != hosts[host]}
        return replace(self.have, stale=frozenset(stale))

    def apply(self, step: Step) -> None:  # noqa: C901 (a case for each step)
        have = self.have
        assert have.is_there or isinstance(step, Create), step
        match step:
            case Create():
                have = replace(have, is_there=True)
            case CloseToOthers():
                have = replace(have, is_open=False)
            case OpenToAll():
                assert not have.hosts, "nvmet refuses it while hosts are listed"
                have = replace(have, is_open=True)
            case LetIn(host, secrets):
                assert not have.is_open, "nvmet refuses it while every host may connect"
                self.secrets[host] = secrets
                have = replace(have, hosts=have.hosts | {host})
            case ShutOut(host):
                have = replace(have, hosts=have.hosts - {host})
            case Offer(export):
                free = min(set(range(1, 99)) - {each.slot for each in have.offered})
                have = replace(have, offered=(*have.offered, Offered(free, export.nguid, export.device)))
            case TakeBack(slot):
                have = replace(have, offered=tuple(each for each in have.offered if each.slot != slot))
            case Listen(controller):
                have = replace(have, controllers=have.controllers | {controller})
            case StopListening(controller):
                have = replace(have, controllers=have.controllers - {controller})
            case Remove():
                assert have == Have(is_there=True, is_open=have.is_open), "nvmet refuses it: busy"
                have = Have()
        self.have = have

    def seen_by(self, host: str) -> frozenset[str]:
        """Return which drives a host can see."""
        is_in = self.have.is_open or host in self.have.hosts
        shown = frozenset(each.nguid for each in self.have.offered if each.is_whole)
        return shown if is_in and self.have.controllers else frozenset()


_HOSTS = st.dictionaries(st.sampled_from([ALICE, BOB]), st.sampled_from([HostSecrets("x"), HostSecrets("y")]))
_EXPORTS = st.frozensets(
    st.builds(Export, st.sampled_from(["1" * 32, "2" * 32, "3" * 32]), st.just("/dev/x")), max_size=3
)
_WANTS = st.builds(
    Want,
    st.lists(st.sampled_from([A, B]), unique=True, min_size=1, max_size=2).map(tuple),
    _EXPORTS,
    _HOSTS,
) | st.just(NOTHING)


_ALICE_SEES_ONE = Want((A,), frozenset({ONE}), {ALICE: HostSecrets("x")})
_BOB_SEES_TWO = Want((A,), frozenset({TWO}), {BOB: HostSecrets("x")})


@given(st.lists(_WANTS, min_size=1, max_size=4), st.data())
def test_wherever_it_begins_and_is_broken_off_it_ends_as_wanted(
    wants: list[Want], data: st.DataObject
) -> None:
    model = Model()
    for want in wants:
        steps = plan(want, model.observe(dict(want.hosts)))
        for step in steps[: data.draw(st.integers(0, len(steps)))]:
            model.apply(step)
    for step in plan(wants[-1], model.observe(dict(wants[-1].hosts))):
        model.apply(step)
    assert plan(wants[-1], model.observe(dict(wants[-1].hosts))) == []


@example(_ALICE_SEES_ONE, _BOB_SEES_TWO)
@example(_ALICE_SEES_ONE, Want((A,), frozenset({TWO})))
@example(Want((A,), frozenset({ONE})), _BOB_SEES_TWO)
@given(_WANTS, _WANTS)
def test_at_no_step_does_a_host_see_what_it_saw_neither_before_nor_after(before: Want, after: Want) -> None:
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
    files = Controller(Transport.FILES, "/srv/shelf")
    assert plan(Want((files,)), Have()) == [Create(), OpenToAll(), Listen(files)]
