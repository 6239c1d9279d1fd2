"""Build images with docker, buildah or podman, from the Containerfile: ``make images``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from helm.images.recipes import RECIPES, REPOSITORY, project_version

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("docker", "buildah", "podman")
CANNOT_RUN = 77
"""Exit code without an engine; automake's for a skip."""


def build_command(engine: str, role: str, options: argparse.Namespace) -> list[str]:
    """Return the command for one image."""
    version = project_version(ROOT)
    arguments = {"VERSION": version} | ({"BASE": options.base} if options.base else {})
    name = f"{options.repository}-{role}:{options.tag or version}"
    return [
        engine,
        "build",
        *("--file", "helm/images/Containerfile", "--target", role, "--tag", name),
        *(word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")),
        *(("--platform", options.platform) if options.platform else ()),
        ".",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named images; return the exit code."""
    roles = [recipe.role for recipe in RECIPES]
    parser = argparse.ArgumentParser(prog="make images", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(roles)} (default: all)")
    parser.add_argument("--engine", choices=ENGINES, help="(default: the first found)")
    parser.add_argument("--base", help="base image (default: as in the Containerfile)")
    parser.add_argument("--platform", help="such as linux/arm64 (default: this machine's)")
    parser.add_argument("--repository", default=REPOSITORY, help="begin of the names (default: %(default)s)")
    parser.add_argument("--tag", help="(default: the version)")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(roles):
        parser.error(f"unknown image: {', '.join(sorted(unknown))}")
    engine = next(filter(shutil.which, [options.engine] if options.engine else ENGINES), None)
    if engine is None:
        missing = options.engine or "docker, buildah, podman"
        sys.stderr.write(
            f"{missing}: not on PATH. On Debian, `python -m helm.images.debian --out dist/images` builds "
            "images without an engine.\n"
        )
        return CANNOT_RUN
    for role in options.names or roles:
        if code := subprocess.run(build_command(engine, role, options), cwd=ROOT, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
