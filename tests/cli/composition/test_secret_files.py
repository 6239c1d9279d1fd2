"""Secrets from files, and their access rights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ostraca_cli.composition.secret_files import read_access, read_fabric_key, read_secret
from ostraca_fabric.errors import FormatError
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.wire.handshake import Access

TOKEN = "correct-horse-battery-staple"


def secret(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_secret_is_read_where_nobody_else_can_read_or_change_it(tmp_path: Path, mode: int) -> None:
    assert read_secret(secret(tmp_path / "s", b"x", mode)) == b"x"


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o660, 0o601])
def test_a_secret_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(FormatError, match=rf"is open to other users \(mode {mode:o}\): chmod 600"):
        read_secret(secret(tmp_path / "s", b"x", mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = secret(tmp_path / "s", b"x")
    os.chown(path, 12345, -1)
    with pytest.raises(FormatError, match="belongs to user 12345"):
        read_secret(path)


def test_a_link_to_a_secret_is_followed_as_container_platforms_make_them(tmp_path: Path) -> None:
    secret(tmp_path / "real", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_secret(tmp_path / "link") == b"x"


def test_a_fabric_key_has_its_length(tmp_path: Path) -> None:
    assert read_fabric_key(secret(tmp_path / "k", bytes(32))) == bytes(32)
    with pytest.raises(FormatError, match="has 31 bytes"):
        read_fabric_key(secret(tmp_path / "k", bytes(31)))
    with pytest.raises(FormatError, match="can't be read"):
        read_fabric_key(tmp_path / "none")


def test_tokens_and_users_are_read_by_tenant(tmp_path: Path) -> None:
    content = f"""
        fabric = ["{TOKEN}-f"]
        [tokens]
        team-a = ["{TOKEN}", "{TOKEN}-new"]
        [users]
        team-b = [1000, 1001]
    """
    assert read_access(secret(tmp_path / "t", content.encode()), 7) == Access(
        7,
        tenant_tokens={TenantId("team-a"): (TOKEN, f"{TOKEN}-new")},
        tenant_uids={TenantId("team-b"): frozenset({1000, 1001})},
        fabric_tokens=(f"{TOKEN}-f",),
    )
    assert read_access(secret(tmp_path / "t", b""), 7) == Access(7)


@pytest.mark.parametrize(
    "content",
    [
        f"tokens = {TOKEN}",
        f'{TOKEN} = ["{TOKEN}"]',
        f'tokens = ["{TOKEN}"]',
        f'[tokens]\na = "{TOKEN}"',
        f"[tokens]\na = [7, '{TOKEN}']",
        f'[tokens]\n"no name!" = ["{TOKEN}"]',
        f'[tokens]\na = ["{TOKEN} and a space"]',
        '[tokens]\na = ["short-horse"]',
        f'[users]\na = ["{TOKEN}"]',
        "[users]\na = [-1]",
        "[users]\na = [true]",
        f'fabric = "{TOKEN}"',
    ],
)
def test_what_is_wrong_is_said_without_repeating_what_the_file_holds(tmp_path: Path, content: str) -> None:
    path = secret(tmp_path / "t", content.encode())
    with pytest.raises(FormatError) as caught:
        read_access(path, 7)
    assert str(caught.value).startswith(str(path))
    assert "horse" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_what_is_no_toml_is_told_by_its_line(tmp_path: Path) -> None:
    path = secret(tmp_path / "t", f'fabric = ["{TOKEN}"]\n[tokens]\n{TOKEN}\n'.encode())
    with pytest.raises(FormatError) as caught:
        read_access(path, 7)
    assert str(caught.value) == f"{path} is no TOML: see line 3"


def test_the_agents_own_user_is_trusted_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for content, is_trusted in (("", True), ("own_user_is_trusted = false", False)):
        path = secret(tmp_path / "tokens", content.encode())
        assert read_access(path, 1).own_user_is_trusted is is_trusted
    with pytest.raises(FormatError, match=r"Expected `bool`, got `str` - at `\$\.own_user_is_trusted`"):
        read_access(secret(tmp_path / "tokens", b'own_user_is_trusted = "no"'), 1)
