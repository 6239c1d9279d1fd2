"""Build the programs of Kubernetes from Debian 12's source package, with Debian 12's Go.

Later releases of Debian package kubectl alone, and no registry of packages has a kubelet. Version 1.20 also
fits Debian 12's containerd: later kubelets need a newer container runtime interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.support.packages import NotHereError, install_programs, run

VERSION = "1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")

_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
_MODULE = "k8s.io/kubernetes"
_OPENAPI = "pkg/generated/openapi/zz_generated.openapi.go"
_OPENAPI_MARK = "+k8s:openapi-gen="
_OPENAPI_FOLDERS = ("pkg", "staging/src/k8s.io", "vendor/k8s.io/kube-openapi", "cmd")
_OPENAPI_EXCLUDED = {"code-generator", "sample-apiserver", "sample-controller", "test", "testing"}
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


def provide(cache: Path) -> Path:
    """Return the folder of the programs, built if missing. Raises NotHereError."""
    programs = cache / f"kubernetes-{VERSION}"
    missing = [name for name in PROGRAMS if not (programs / name).exists()]
    if missing:
        install_programs({"go": "golang-go"})
        build = _Build(cache / "source")
        build.unpack()
        build.generate_openapi()
        programs.mkdir(exist_ok=True)
        for name in missing:
            build.compile(name, programs / name)
        shutil.rmtree(cache / "source")
    return programs


class _Build:
    """Source tree of Kubernetes and Go's cache: 1.8 GB, removed after the build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tree = folder / "gopath/src" / _MODULE
        self._environment = {
            **os.environ,
            "GOPATH": str(folder / "gopath"),
            "GOCACHE": str(folder / "gocache"),
            "GO111MODULE": "off",
            "GOPROXY": "off",
            "GOFLAGS": "",
            "CGO_ENABLED": "0",
        }

    def unpack(self) -> None:
        """Fetch and unpack the source package."""
        if self._tree.exists():
            return
        print("fetching the source package of Kubernetes", flush=True)
        lists = self._folder / "apt/lists"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        sources = self._folder / "apt/debian.sources"
        sources.write_text(_SOURCES.read_text().replace("Types: deb\n", "Types: deb-src\n"))
        configuration = self._folder / "apt/apt.conf"
        configuration.write_text(
            f'Dir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "-";\nDir::State::lists "{lists}";\n'
            'APT::Sandbox::User "root";\n'
        )
        apt = {"APT_CONFIG": str(configuration)}
        run("apt-get", "update", "-qq", environment=apt)
        run("apt-get", "source", "-qq", "--download-only", "kubernetes", folder=self._folder, environment=apt)
        archives = list(self._folder.glob("kubernetes_*.orig.tar.gz"))
        if not archives:
            raise NotHereError("Debian's archive has no source package of Kubernetes")
        unpacked = self._folder / "unpacked"
        with tarfile.open(archives[0]) as archive:
            archive.extractall(unpacked, filter="tar")
        (top,) = unpacked.iterdir()
        if top.name != f"kubernetes-{VERSION}":
            raise NotHereError(f"Debian's archive has {top.name}, and the test needs kubernetes-{VERSION}")
        self._tree.parent.mkdir(parents=True, exist_ok=True)
        top.rename(self._tree)

    def generate_openapi(self) -> None:
        """Generate OpenAPI definitions, the only generated code that the source package lacks."""
        if (self._tree / _OPENAPI).exists():
            return
        print("building openapi-gen", flush=True)
        generator = self._folder / "openapi-gen"
        self._go("build", "-o", str(generator), f"{_MODULE}/vendor/k8s.io/kube-openapi/cmd/openapi-gen")
        self._call(
            str(generator),
            "--logtostderr",
            *("-i", ",".join(self._openapi_packages())),
            *("-p", f"{_MODULE}/pkg/generated/openapi", "-O", "zz_generated.openapi"),
            *("-h", "hack/boilerplate/boilerplate.generatego.txt"),
            *("-r", str(self._folder / "openapi-violations")),
        )

    def compile(self, name: str, target: Path) -> None:
        """Compile one program."""
        print(f"building {name} (the API server takes most of the time, about 5 minutes)", flush=True)
        major, minor, _ = VERSION.split(".")
        values = {
            "gitMajor": major,
            "gitMinor": minor,
            "gitVersion": f"v{VERSION}",
            "gitTreeState": "archive",
            "gitCommit": "debian",
            "buildDate": "2021-01-13T00:00:00Z",
        }
        flags = ["-s", "-w"]
        for package in _VERSION_PACKAGES:
            for path in (package, f"{_MODULE}/vendor/{package}"):
                flags += [word for key, value in values.items() for word in ("-X", f"{path}.{key}={value}")]
        part = target.with_suffix(".part")
        self._go("build", "-ldflags", " ".join(flags), "-o", str(part), f"{_MODULE}/cmd/{name}")
        part.rename(target)

    def _openapi_packages(self) -> list[str]:
        packages = set()
        for folder in _OPENAPI_FOLDERS:
            for file in (self._tree / folder).rglob("*.go"):
                path = file.parent.relative_to(self._tree)
                is_excluded = _OPENAPI_EXCLUDED.intersection(path.parts) or (
                    "kube-openapi" in path.parts and {"cmd", "generators"}.intersection(path.parts)
                )
                if not is_excluded and _OPENAPI_MARK in file.read_text(errors="replace"):
                    name = path.as_posix()
                    staged = name.removeprefix("staging/src/")
                    packages.add(f"{_MODULE}/{name}" if staged == name else f"{_MODULE}/vendor/{staged}")
        return sorted(packages)

    def _go(self, *words: str) -> None:
        self._call("go", *words)

    def _call(self, *words: str) -> None:
        done = subprocess.run(
            ["nice", "-n", "10", *words],
            cwd=self._tree,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-20:]
            raise RuntimeError("\n".join([f"{' '.join(words[:3])} failed:", *last]))
