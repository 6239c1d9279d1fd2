"""Which hosts may connect, as a file says; and what is refused without being repeated."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest

from ostraca_cli.commands.serve.enclosure.hosts import is_dhchap, read_hosts
from ostraca_enclosure.plan import HostSecrets
from ostraca_fabric.errors import FormatError

ALICE, BOB = (
    "nqn.2025-01.io.ostraca:alice",
    "nqn.2014-08.org.nvmexpress:uuid:0f0e0d0c-0b0a-0908-0706-050403020100",
)


def secret(kind: str = "00", size: int = 32, *, is_good: bool = True) -> str:
    key = bytes(range(size))
    crc = zlib.crc32(key) ^ (not is_good)
    return f"DHHC-1:{kind}:{base64.b64encode(key + crc.to_bytes(4, 'little')).decode()}:"


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_host_has_its_secrets_or_none(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f'[hosts."{ALICE}"]\nsecret = "{secret()}"\ncontroller_secret = "{secret("01")}"\n[hosts."{BOB}"]\n',
    )
    assert read_hosts(path, is_files=False) == {
        ALICE: HostSecrets(secret(), secret("01")),
        BOB: HostSecrets(),
    }


@pytest.mark.parametrize(
    ("kind", "size"), [("00", 32), ("00", 48), ("00", 64), ("01", 32), ("02", 48), ("03", 64)]
)
def test_a_secret_as_nvme_makes_them_is_taken(kind: str, size: int) -> None:
    assert is_dhchap(secret(kind, size))
    assert not is_dhchap(secret(kind, size, is_good=False))


def test_one_of_nvme_clis_own_is_taken() -> None:
    assert is_dhchap("DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:")


@pytest.mark.parametrize(
    "text", ["", "secret", secret("01", 48), secret("04"), secret()[:-1], secret().replace(":00:", ":0:")]
)
def test_what_is_none_is_refused(text: str) -> None:
    assert not is_dhchap(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[hosts\n", "is invalid TOML"),
        ("", "write 1 to 4096 tables"),
        ("[hosts]\n", "write 1 to 4096 tables"),
        ('[hosts."alice"]\n', "is no NVMe qualified name"),
        (f'[hosts."{ALICE}"]\nsecert = "verysecret"\n', "only secret and controller_secret"),
        (f'[hosts."{ALICE}"]\nsecret = "verysecret"\n', "no complete DH-HMAC-CHAP secret"),
        (f'[hosts."{ALICE}"]\nsecret = 12\n', "strings of printable"),
        (f'[hosts."{ALICE}"]\ncontroller_secret = "{secret()}"\n', "add the secret of the host"),
        (f'[hosts."{ALICE}"]\nsecret = "verysecret', "is invalid TOML"),
        ("[hosts]\nx = 1\n[tokens]\n", "write 1 to 4096 tables"),
    ],
)
def test_what_can_not_be_used_is_told_and_not_repeated(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said) as caught:
        read_hosts(written(tmp_path, text), is_files=False)
    assert "verysecret" not in str(caught.value)


def test_an_enclosure_on_files_takes_any_text(tmp_path: Path) -> None:
    path = written(tmp_path, f'[hosts."{ALICE}"]\nsecret = "anything"\n')
    assert read_hosts(path, is_files=True) == {ALICE: HostSecrets("anything")}


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="chmod 600"):
        read_hosts(written(tmp_path, f'[hosts."{ALICE}"]\n', 0o644), is_files=True)
