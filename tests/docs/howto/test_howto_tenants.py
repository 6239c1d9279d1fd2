"""The file of tokens on the page about tenants is accepted as it is."""

from __future__ import annotations

from pathlib import Path

from ostraca_cli.composition.secret_files import read_access
from ostraca_fabric.model.ids import TenantId

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "volumes" / "share-among-tenants.md"


def test_the_file_of_tokens_is_accepted_as_copied(tmp_path: Path) -> None:
    shown = PAGE.read_text().partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "tokens.toml"
    file.write_text(shown)
    file.chmod(0o600)
    access = read_access(file, 0)
    assert len(access.tenant_tokens[TenantId("acme")]) == 2
