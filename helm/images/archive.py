"""Images as files for ``docker load``, ``podman load`` and ``ctr images import``."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from helm.images.layers import EPOCH_S, Layer
from helm.images.recipes import ENVIRONMENT, USER, Recipe


@dataclass(frozen=True)
class Image:
    """Image ready to be written."""

    recipe: Recipe
    tag: str
    layers: Sequence[Layer]
    config: bytes

    @property
    def reference(self) -> str:
        """Name and tag."""
        return f"{self.recipe.name}:{self.tag}"

    @property
    def id(self) -> str:
        """Digest of the configuration, which engines show as the image's id."""
        return hashlib.sha256(self.config).hexdigest()


def image_of(recipe: Recipe, tag: str, architecture: str, version: str, layers: Sequence[Layer]) -> Image:
    """Return the image of a recipe."""
    created = datetime.fromtimestamp(EPOCH_S, UTC).isoformat().replace("+00:00", "Z")
    settings: dict[str, Any] = {
        "User": f"{USER}:{USER}",
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "Entrypoint": list(recipe.entrypoint),
        "Cmd": list(recipe.command) or None,
        "WorkingDir": "/",
        "StopSignal": "SIGTERM",
        "Labels": labels_of(recipe, version),
    }
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}" for layer in layers]},
        "history": [{"created": created, "created_by": layer.comment} for layer in layers],
    }
    return Image(recipe, tag, layers, json.dumps(config, sort_keys=True).encode())


def labels_of(recipe: Recipe, version: str) -> dict[str, str]:
    """Return the labels of an image; the Containerfile sets the same."""
    return {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.description": f"Ostraca: {recipe.summary}",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }


def write_archive(images: Sequence[Image], to: Path) -> None:
    """Write images as one archive; images in the same archive share layers."""
    part = to.with_suffix(f".{os.getpid()}")
    manifest = []
    with tarfile.open(part, "w", format=tarfile.GNU_FORMAT) as tar:
        for layer in {layer.digest: layer for image in images for layer in image.layers}.values():
            info = tarfile.TarInfo(_layer_name(layer))
            info.size, info.mtime = layer.path.stat().st_size, EPOCH_S
            with layer.path.open("rb") as content:
                tar.addfile(info, content)
        for image in images:
            _add(tar, f"{image.id}.json", image.config)
            manifest.append(
                {
                    "Config": f"{image.id}.json",
                    "RepoTags": [image.reference],
                    "Layers": [_layer_name(layer) for layer in image.layers],
                }
            )
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    part.replace(to)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(content), EPOCH_S
    tar.addfile(info, io.BytesIO(content))


def _layer_name(layer: Layer) -> str:
    return f"{layer.digest}/layer.tar"
