"""Images from Debian packages: paths, links, bytes and archives, with packages that the tests make."""

import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import IO, Any

import pytest
from helm.images import debs, wheels
from helm.images.apt import Package
from helm.images.archive import Image, image_of, write_archive
from helm.images.layers import Entries, Layer, LayerCache
from helm.images.recipes import RECIPES, USER

CONTROL = "Package: tool\nVersion: 1:2.0-1\nArchitecture: all\nMaintainer: A <a@b>\nDescription: d\n"

needs_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb, of Debian, is not installed")


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Build a package with files of an unmerged Debian, links of both kinds, and a manual page."""
    tree = tmp_path / "tree"
    files = {
        "DEBIAN/control": CONTROL,
        "bin/tool": "#!/bin/sh\n",
        "lib/tool/data": "data",
        "usr/lib/python3/dist-packages/tool.py": "X = 1\n",
        "usr/share/man/man1/tool.1": "manual",
        "usr/share/doc/tool/changelog": "changes",
        "usr/share/doc/tool/copyright": "licence",
        "usr/share/ca-certificates/mozilla/B.crt": "B\n",
        "usr/share/ca-certificates/mozilla/A.crt": "A\n",
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "bin/tool").chmod(0o755)
    (tree / "bin/alias").hardlink_to(tree / "bin/tool")
    (tree / "lib/tool/link").symlink_to("data")
    file = tmp_path / "tool.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return Package("tool", "1:2.0-1", str(file))


def layer_of(folder: Path, package: Package) -> Layer:
    def make(entries: Entries) -> list[dict[str, Any]]:
        components = debs.add_packages(entries, [package], "")
        debs.add_skeleton(entries)
        return components

    return LayerCache(folder).layer("tool", {"version": package.version}, make)


def read(tar: tarfile.TarFile, name: str) -> bytes:
    content: IO[bytes] | None = tar.extractfile(name)
    assert content is not None
    return content.read()


@needs_dpkg
def test_a_layer_resembles_an_installed_system(tmp_path: Path, package: Package) -> None:
    with tarfile.open(layer_of(tmp_path / "cache", package).path) as tar:
        entries = {entry.name: entry for entry in tar}
        assert entries["bin"].linkname == "usr/bin"
        assert entries["usr/bin/tool"].mode == 0o755
        assert read(tar, "usr/bin/alias") == b"#!/bin/sh\n", "a hard link leads to its file"
        assert entries["usr/lib/tool/link"].linkname == "data"
        assert read(tar, "etc/ssl/certs/ca-certificates.crt") == b"A\nB\n"
        assert b"\nVersion: 1:2.0-1\n" in read(tar, "var/lib/dpkg/status.d/tool")
        assert "usr/share/doc/tool/copyright" in entries
        assert not {"usr/share/man/man1/tool.1", "usr/share/doc/tool/changelog"} & set(entries)
        assert {(entry.mtime, entry.uname, entry.gname) for entry in entries.values()} == {(0, "", "")}
        owned = {name for name, entry in entries.items() if (entry.uid, entry.gid) == (USER, USER)}
        assert owned == {"etc/ostraca", "run/ostraca", "var/lib/ostraca"}


@needs_dpkg
def test_equal_packages_give_equal_bytes_and_a_cache_keeps_a_layer(tmp_path: Path, package: Package) -> None:
    first, second = layer_of(tmp_path / "first", package), layer_of(tmp_path / "second", package)
    assert first.digest == second.digest == hashlib.sha256(second.path.read_bytes()).hexdigest()
    Path(package.file).unlink()
    assert layer_of(tmp_path / "first", package) == first


@needs_dpkg
def test_an_archive_names_its_images_by_the_digests_of_their_parts(tmp_path: Path, package: Package) -> None:
    layer = layer_of(tmp_path / "cache", package)
    images = [image_of(recipe, "1.2", "amd64", "0.1", [layer]) for recipe in RECIPES]
    write_archive(images, tmp_path / "images.tar")
    with tarfile.open(tmp_path / "images.tar") as tar:
        assert tar.getnames().count(f"{layer.digest}/layer.tar") == 1, "images share a layer"
        manifest = json.loads(read(tar, "manifest.json"))
        assert [each["RepoTags"] for each in manifest] == [
            [f"ostraca-{recipe.role}:1.2"] for recipe in RECIPES
        ]
        for each, image in zip(manifest, images, strict=True):
            check_config(tar, each, image)


def check_config(tar: tarfile.TarFile, entry: dict[str, Any], image: Image) -> None:
    text = read(tar, entry["Config"])
    assert entry["Config"] == f"{hashlib.sha256(text).hexdigest()}.json"
    config = json.loads(text)
    digests = [f"sha256:{hashlib.sha256(read(tar, name)).hexdigest()}" for name in entry["Layers"]]
    assert config["rootfs"]["diff_ids"] == digests
    assert config["config"]["User"] == f"{USER}:{USER}"
    assert config["config"]["Entrypoint"] == list(image.recipe.entrypoint)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("./", ""),
        ("./bin/sh", "usr/bin/sh"),
        ("./lib64/ld.so", "usr/lib64/ld.so"),
        ("./usr/bin/env", "usr/bin/env"),
        ("./lib", "lib"),
        ("./library/x", "library/x"),
    ],
)
def test_paths_are_those_of_a_merged_usr(name: str, path: str) -> None:
    assert debs.merged(name) == path


def test_a_list_of_files_leaves_out_what_an_image_lacks() -> None:
    kept = "numpy/__init__.py,sha256=a,1\nnixl_cu12/_api.py,sha256=b,2\n"
    lacks = "bin/f2py,sha256=c,3\nnixl_ep_cu12/x.so,sha256=d,4\no.dist-info/uv_cache.json,sha256=e,5\n"
    assert wheels.kept_records(f"{lacks}{kept}") == kept
