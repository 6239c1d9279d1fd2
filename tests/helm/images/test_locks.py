"""Lock files of the images: the versions and hashes of the project's lock, and all that an extra needs."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from helm.images.recipes import RECIPES

ROOT = Path(__file__).parents[3]
LOCKS = ROOT / "helm/images/locks"
BUILD = LOCKS / "build.lock"
"""Needs of the wheel's build in the Containerfile."""


def test_every_recipe_has_its_lock_file() -> None:
    assert {recipe.lock for recipe in RECIPES if recipe.lock} == {path.stem for path in LOCKS.iterdir()} - {
        BUILD.stem
    }


@pytest.mark.parametrize("path", sorted(LOCKS.iterdir()), ids=lambda path: path.stem)
def test_an_image_has_the_locked_versions_and_hashes(path: Path) -> None:
    locked = set((ROOT / "requirements.lock").read_text("utf-8").splitlines())
    assert [line for line in path.read_text("utf-8").splitlines() if line not in locked] == []


@pytest.mark.parametrize("path", sorted(set(LOCKS.iterdir()) - {BUILD}), ids=lambda path: path.stem)
def test_an_image_has_the_dependencies_of_its_extra(path: Path) -> None:
    listed = set(re.findall(r"^([\w-]+)==", path.read_text("utf-8"), re.MULTILINE))
    wanted = {
        re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]  # a requirement begins with a name
        for requirement in metadata.requires("ostraca") or []
        if "extra ==" not in requirement or re.search(rf"extra == ['\"]{path.stem}['\"]", requirement)
    }
    assert wanted
    assert wanted <= listed
