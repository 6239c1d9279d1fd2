"""Tokens: what may be one, where a client reads it, and that it may change while the client lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sdk.conftest import BLOCK_BYTES, LAYOUT, SETTINGS, no_thread_to_be_had
from tests.sdk.operations.test_faults import FAR_S, somewhere, stored
from tests.sdk.scripted_agent import ScriptedAgent, agent_at
from tests.support.stalls import Stopwatch

import ostraca
from ostraca import BlockState, Reason
from ostraca._connection.credentials import TOKEN_BYTES_MAX, Credentials, choose_credentials
from ostraca._connection.dial import ClientIdentity
from ostraca._failover.background import HealthProbe
from ostraca_fabric.wire.address import parse_address

FIRST, SECOND = "first-token-12345", "second-token-1234"
NEVER_S = 3600.0


def shown(credentials: Credentials, within_s: float = FAR_S) -> str:
    return credentials.token(time.monotonic() + within_s)


# --- what may be a token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [FIRST, f"{FIRST}\n", f" {FIRST}\r\n", f"\t{FIRST}"])
def test_what_surrounds_a_token_is_left_out(around: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(around)
    assert shown(Credentials(around)) == FIRST
    assert shown(Credentials(lambda: around)) == FIRST
    assert shown(Credentials(file=str(tmp_path / "token"))) == FIRST


WRONG = [
    "",
    " \n",
    f"{FIRST}\n{SECOND}",
    f"Bearer {FIRST}",
    f"{FIRST}\0",
    "t\u00f6ken",
    "\ud800",
    "x" * (TOKEN_BYTES_MAX + 1),
]


@pytest.mark.parametrize("wrong", [*WRONG, 5, FIRST.encode(), ["x"]], ids=lambda wrong: ascii(wrong)[:20])
def test_what_is_no_token_is_refused_and_not_repeated(wrong: Any) -> None:
    with pytest.raises(ostraca.UsageError, match=r"^credentials ") as refused:
        Credentials(wrong)
    assert FIRST not in str(refused.value)
    living = Credentials(FIRST)
    with pytest.raises(ostraca.UsageError):
        living.set(wrong)
    assert shown(living) == FIRST


@pytest.mark.parametrize("wrong", [*WRONG, None, FIRST.encode()], ids=lambda wrong: ascii(wrong)[:20])
def test_a_callable_that_returns_none_is_asked_again(wrong: Any) -> None:
    answers = [wrong, FIRST]
    credentials = Credentials(lambda: answers.pop(0))
    with pytest.raises(
        ostraca.ConnectError, match="the return value of the credentials' callable"
    ) as refused:
        shown(credentials)
    assert FIRST not in str(refused.value)
    assert shown(credentials) == FIRST


@pytest.mark.parametrize(
    "error", [ValueError("the vault is sealed"), TimeoutError("the vault is away"), SystemExit(1)]
)
def test_a_callable_that_raises_is_asked_again(error: BaseException) -> None:
    errors = [error]

    def source() -> str:
        if errors:
            raise errors.pop()
        return FIRST

    credentials = Credentials(source)
    with pytest.raises(ostraca.ConnectError, match=f"callable raised {type(error).__name__}: "):
        shown(credentials)
    assert shown(credentials) == FIRST


def test_a_callable_that_takes_its_time_costs_a_dial_no_more_than_it_has() -> None:
    goes_on, calls = threading.Event(), []

    def source() -> str:
        calls.append(1)
        assert goes_on.wait(FAR_S)
        return FIRST

    credentials, watch = Credentials(source), Stopwatch()
    for _ in range(2):
        with pytest.raises(ostraca.ConnectError, match="gave no token in time"):
            shown(credentials, within_s=0.02)
    assert watch.took_s < FAR_S / 2
    goes_on.set()
    assert (shown(credentials), len(calls)) == (FIRST, 1), "the call that was begun is waited for"
    assert (shown(credentials), len(calls)) == (FIRST, 2)


def test_without_a_thread_it_is_read_all_the_same() -> None:
    with no_thread_to_be_had("ostraca-token"):
        assert shown(Credentials(lambda: FIRST)) == FIRST


# --- files --------------------------------------------------------------------------------------------------


def is_gone(path: Path) -> None:
    """Leave nothing there."""


def is_of(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (is_gone, "can't be read: No such file"),
        (Path.mkdir, "is no regular file"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to(path), "can't be read: Too many levels"),
        (is_of(b""), "is empty"),
        (is_of(b"\xff\xfe" + bytes(64)), "another character that no token has"),
        (is_of(f"{FIRST}\n{SECOND}\n".encode()), "a space, a line break"),
        (is_of(b"x" * 10 * TOKEN_BYTES_MAX), "and a token at most"),
    ],
)
def test_a_file_that_holds_no_token_is_named_and_read_again(
    make: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    make(tmp_path / "token")
    credentials = Credentials(file=str(tmp_path / "token"))
    for _ in range(2):
        with pytest.raises(ostraca.ConnectError, match=rf"token file {tmp_path}/token .*{words}") as refused:
            shown(credentials)
        assert FIRST not in str(refused.value)
    (tmp_path / "next").write_text(f"{FIRST}\n")
    if (tmp_path / "token").is_dir():
        (tmp_path / "token").rmdir()
    (tmp_path / "next").rename(tmp_path / "token")
    assert shown(credentials) == FIRST


def test_what_is_passed_goes_before_the_settings_and_these_before_the_environment(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(FIRST)
    (tmp_path / "b").write_text(SECOND)
    settings, environment = (
        replace(SETTINGS, token_file=str(tmp_path / "a")),
        {"OSTRACA_TOKEN_FILE": str(tmp_path / "b")},
    )
    assert shown(choose_credentials("third", settings, environment)) == "third"
    assert shown(choose_credentials(None, settings, environment)) == FIRST
    assert shown(choose_credentials(None, SETTINGS, environment)) == SECOND
    assert shown(choose_credentials(None, SETTINGS, {})) == ""


# --- clients that live --------------------------------------------------------------------------------------


def test_a_file_that_is_replaced_is_read_by_the_next_dial(
    agent: ScriptedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("OSTRACA_TOKEN_FILE", str(file))
    agent.let_in(FIRST)
    with pytest.raises(ostraca.ConnectError, match=f"{file} can't be read"):
        ostraca.connect(agent.address, settings=SETTINGS)
    file.write_text(f"{FIRST}\n")
    with ostraca.connect(agent.address, settings=SETTINGS) as client:
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        agent.let_in(SECOND)
        until_refused(volume, chain, "the token is not valid for tenant default")
        file.unlink()
        until_refused(volume, chain, "can't be read")
        file.write_text(f"{SECOND}\n")
        until_hit(volume, chain)


def test_a_living_client_is_given_another_token_and_dials_at_once(agent: ScriptedAgent) -> None:
    agent.let_in(FIRST)
    with ostraca.connect(
        agent.address, credentials=FIRST, settings=replace(SETTINGS, redial_s=NEVER_S)
    ) as client:
        volume = client.volume("kv", LAYOUT, block_bytes=BLOCK_BYTES, create=True)
        chain, _ = stored(volume, 2)
        agent.let_in(SECOND)
        until_refused(volume, chain, "the token is not valid for tenant default")
        client.set_credentials(lambda: SECOND)
        assert set(volume.get(chain, into=somewhere(2), deadline_s=FAR_S).states) == {BlockState.HIT}


def test_agents_that_change_tokens_one_by_one_lose_no_client(agent: ScriptedAgent, tmp_path: Path) -> None:
    agent.let_in(FIRST)
    settings = replace(SETTINGS, failback_after_s=0.02)
    with agent_at(tmp_path / "preferred.sock", name="preferred") as preferred:
        preferred.let_in(SECOND)
        addresses = [preferred.address, agent.address]
        with ostraca.connect(addresses, credentials=FIRST, settings=settings) as client:
            assert client.agent == "agent-1", "the first has refused the token, so the next one was asked"
            client.set_credentials(SECOND)
            until_s = time.monotonic() + FAR_S
            while client.agent != "preferred":
                assert time.monotonic() < until_s, "it goes back with the new token"
                threading.Event().wait(0.01)


def test_an_address_that_nobody_asked_for_want_of_a_token_has_not_answered(agent: ScriptedAgent) -> None:
    caller = ClientIdentity("default", Credentials(file="/nowhere/token"), {})
    probe = HealthProbe(caller, SETTINGS, lambda: True, lambda: None)
    address = parse_address(agent.address)
    assert not probe._is_answered_at(address)
    caller.credentials.set(FIRST)
    assert probe._is_answered_at(address), "a refusal is an answer"


def until_refused(volume: ostraca.Volume, chain: ostraca.Chain, words: str) -> None:
    """Get until the client has dialled and was refused with these words."""
    until_s = time.monotonic() + FAR_S
    while True:
        got = volume.get(chain, into=somewhere(2), deadline_s=FAR_S)
        assert set(got.reasons) == {Reason.DISCONNECTED}
        if words in got.note:
            return
        assert time.monotonic() < until_s, got.note


def until_hit(volume: ostraca.Volume, chain: ostraca.Chain) -> None:
    """Get until the client is let in."""
    until_s = time.monotonic() + FAR_S
    while set(volume.get(chain, into=somewhere(2), deadline_s=FAR_S).states) != {BlockState.HIT}:
        assert time.monotonic() < until_s
