"""Build images from Debian packages and wheels, without a container engine and without root.

Each image becomes a file for ``docker load``, ``podman load`` and ``ctr images import``, beside a list of the
packages in the image (CycloneDX). Finished layers are kept, so a second build takes seconds.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helm.images import debs, sbom, wheels
from helm.images.apt import Apt, Package
from helm.images.archive import Image, image_of, write_archive
from helm.images.errors import ImageError
from helm.images.layers import Entries, Layer, LayerCache
from helm.images.recipes import RECIPES, Recipe, project_version

ROOT = Path(__file__).resolve().parents[2]
_HOST = {machine: name for name, machine in wheels.MACHINES.items()}
_ALL = "ostraca-images"


class ImageBuild:
    """Build of images for one architecture, from one source tree."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Take the command's options."""
        cache: Path = options.cache
        self._architecture: str = options.arch
        self._source: Path = options.source
        self._refreshes: bool = options.refresh
        self._apt = Apt(cache / "apt", self._architecture, options.sources)
        self._layers = LayerCache(cache / "layers")
        self._wheels = cache / "wheels"
        self.version = project_version(self._source)

    def image(self, recipe: Recipe, tag: str) -> tuple[Image, dict[str, Any]]:
        """Build an image; return the image and the list of its packages."""
        layers, python = self._debian_layers(recipe)
        if recipe.lock:
            layers += self._python_layers(recipe, python)
        components = [component for layer in layers for component in layer.components]
        bill = sbom.document(recipe.name, self.version, components)
        text = sbom.text_of(bill)
        path = f"usr/share/sbom/{recipe.name}.cdx.json"
        layers.append(
            self._layers.layer(
                f"packages of {recipe.name}", {"text": text}, lambda to: _add_text(to, path, text)
            )
        )
        return image_of(recipe, tag, self._architecture, self.version, layers), bill

    def _debian_layers(self, recipe: Recipe) -> tuple[list[Layer], str]:
        layers, names, present = list[Layer](), list[str](), set[str]()
        python = ""
        for group in recipe.packages:
            names += group
            every = self._apt.packages(names, refreshes=self._refreshes)
            python = python or _python_of(every)
            added = [each for each in every if each.name not in present]
            is_first = not present
            present |= {each.name for each in every}
            layers.append(self._debian_layer(group, added, python, is_first=is_first))
        return layers, python

    def _debian_layer(
        self, group: Sequence[str], packages: Sequence[Package], python: str, *, is_first: bool
    ) -> Layer:
        def make(entries: Entries) -> list[dict[str, Any]]:
            components = debs.add_packages(entries, packages, python)
            if is_first:
                debs.add_skeleton(entries)
            return components

        listed = sorted(f"{each.name}={each.version}" for each in packages)
        inputs = {"apt": self._apt.key, "packages": listed, "is_first": is_first, "compiler": sys.version}
        return self._layers.layer(f"Debian packages {' '.join(group)}", inputs, make)

    def _python_layers(self, recipe: Recipe, python: str) -> list[Layer]:
        lock = Path(__file__).parent / "locks" / f"{recipe.lock}.lock"
        common = {"architecture": self._architecture, "python": python, "compiler": sys.version}
        wheel = wheels.build_wheel(self._source, self._architecture, self._wheels)
        return [
            self._layers.layer(
                f"Python packages of {lock.name}",
                {**common, "lock": lock.read_text("utf-8")},
                lambda to: wheels.add_locked(to, lock, self._architecture, python),
            ),
            self._layers.layer(
                f"Ostraca {self.version}",
                {**common, "wheel": f"{wheel.parent.name}/{wheel.name}"},
                lambda to: wheels.add_project(to, wheel, self._architecture, python),
            ),
        ]


def _python_of(packages: Sequence[Package]) -> str:
    matches = (re.fullmatch(r"python(3\.\d+)-minimal", each.name) for each in packages)
    return next((match[1] for match in matches if match), "")


def _add_text(entries: Entries, path: str, text: str) -> list[dict[str, Any]]:
    entries.add_file(path, text.encode())
    return []


def _debian_sources() -> Path:
    folder = Path("/etc/apt")
    modern = folder / "sources.list.d/debian.sources"
    return modern if modern.exists() else folder / "sources.list"


def _parser() -> argparse.ArgumentParser:
    names = [recipe.role for recipe in RECIPES]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(prog="python -m helm.images.debian", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"images, of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument("--tag", help="tag of the images (default: the version)")
    parser.add_argument(
        "--bundle", action="store_true", help=f"write one file, {_ALL}.tar; layers are shared"
    )
    parser.add_argument(
        "--source", type=Path, default=ROOT, metavar="DIR", help="checkout to build (default: this one)"
    )
    parser.add_argument(
        "--arch",
        choices=wheels.MACHINES,
        default=_HOST.get(os.uname().machine, "amd64"),
        help="architecture of the images (default: %(default)s)",
    )
    parser.add_argument("--refresh", action="store_true", help="take newer Debian packages")
    parser.add_argument(
        "--sources",
        type=Path,
        default=_debian_sources(),
        metavar="FILE",
        help="Debian package sources (default: %(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=home / "ostraca" / "images",
        metavar="DIR",
        help="packages and finished layers (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named images; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {recipe.role for recipe in RECIPES}:
        parser.error(f"unknown image: {', '.join(sorted(unknown))}")
    chosen = [recipe for recipe in RECIPES if not options.names or recipe.role in options.names]
    began_s = time.monotonic()
    try:
        build = ImageBuild(options)
        built = [build.image(recipe, options.tag or build.version) for recipe in chosen]
    except ImageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for image, bill in built:
        (options.out / f"{image.recipe.name}.cdx.json").write_text(sbom.text_of(bill), "utf-8")
    images = [image for image, _ in built]
    groups = {_ALL: images} if options.bundle else {image.recipe.name: [image] for image in images}
    for name, group in groups.items():
        path = options.out / f"{name}.tar"
        write_archive(group, path)
        references = ", ".join(f"{image.reference} ({image.id[:12]})" for image in group)
        print(f"{path}  {path.stat().st_size >> 20} MiB  {references}")
    print(f"built in {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
