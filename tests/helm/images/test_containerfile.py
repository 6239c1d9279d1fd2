"""The Containerfile and ``make images``: the images of the recipes, and no compiler inside."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helm.images import engine
from helm.images.archive import labels_of
from helm.images.recipes import ENVIRONMENT, ETCD, NVME, PYTHON, RDMA, RECIPES, USER, Recipe

ROOT = Path(__file__).parents[3]
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "helm/images/Containerfile").read_text("utf-8"))
PACKAGES = {"python": PYTHON, "rdma": RDMA, "nvme": NVME, "etcd-files": ETCD}


def stages() -> dict[str, tuple[str, list[str]]]:
    """Return base and instructions of each stage, by name."""
    found: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    for line in TEXT.splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = []
            found[match[2]] = match[1], lines
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def lineage(name: str) -> list[str]:
    """Return all instructions of a stage, those of its bases first."""
    base, lines = stages().get(name, ("", []))
    return [*lineage(base), *lines] if base else []


def last(lines: list[str], instruction: str) -> str:
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{instruction} ")][-1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.role)
def test_a_target_has_the_configuration_of_its_recipe(recipe: Recipe) -> None:
    lines = lineage(recipe.role)
    assert last(lines, "USER") == f"{USER}:{USER}"
    assert last(lines, "ENTRYPOINT") == str(list(recipe.entrypoint)).replace("'", '"')
    assert [line for line in lines if line.startswith("CMD ")] == (
        [f"CMD {list(recipe.command)}".replace("'", '"')] if recipe.command else []
    )
    labels = dict(re.findall(r'(\S+)="([^"]*)"', last(lines, "LABEL")))
    assert labels == labels_of(recipe, "$VERSION")
    environment = dict(word.split("=", 1) for word in last(lines, "ENV").split())
    assert environment == {name: value for name, value in ENVIRONMENT.items() if name != "PATH"}
    assert f"> /usr/share/sbom/{recipe.name}.cdx.json" in " ".join(
        lines
    ) or "COPY --from=etcd-bill" in " ".join(lines)


@pytest.mark.parametrize("stage", PACKAGES)
def test_a_stage_installs_the_packages_of_the_recipes(stage: str) -> None:
    installed = re.findall(r"--no-install-recommends ([\w.+ -]+?) *&&", " ".join(stages()[stage][1]))
    assert set(installed[0].split()) == set(PACKAGES[stage])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.role)
def test_no_image_has_a_compiler_or_an_unpinned_package(recipe: Recipe) -> None:
    text = " ".join(lineage(recipe.role))
    assert "gcc" not in text
    assert "pip " not in text
    assert "gcc" in " ".join(lineage("build")), "the stage of the build has one"


def test_the_base_is_an_argument_without_host_and_digest() -> None:
    assert re.findall(r"^ARG BASE=(.*)$", TEXT, re.MULTILINE) == ["debian:bookworm-slim"]
    bases = {base for base, _ in stages().values()}
    assert bases <= {*stages(), "${BASE}"}
    script = (ROOT / "helm/images/install.sh").read_text("utf-8")
    assert '--require-hashes -r "locks/$1.lock"' in script


def test_every_copied_file_is_in_the_context() -> None:
    admitted = [
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        word
        for line in TEXT.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(f"{path}/".startswith(f"{each}/") for each in admitted), path


def test_make_images_builds_each_image_with_the_engine_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "buildah"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        engine.main(["admin", "--tag", "7", "--base", "localhost/debian", "--platform", "linux/arm64"]) == 0
    )
    words = capfd.readouterr().out.split()
    assert words[:7] == [
        "build",
        "--file",
        "helm/images/Containerfile",
        "--target",
        "admin",
        "--tag",
        "ostraca-admin:7",
    ]
    assert "BASE=localhost/debian" in words
    assert words[-3:] == ["--platform", "linux/arm64", "."]


def test_make_images_without_an_engine_names_the_other_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "helm.images.engine"],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == engine.CANNOT_RUN
    assert "python -m helm.images.debian" in done.stderr


def test_a_failed_build_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine.main([]) == 3
