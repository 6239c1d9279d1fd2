"""Software bill of materials of an image, as CycloneDX 1.6.

Inside an image, ``python sbom.py NAME VERSION`` prints the document; a further argument names the root of
another file system. The module needs no other package.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

_NAMESPACE = uuid.UUID("5f5e1000-0b0a-5c0d-8000-6f7374726163")


def control_fields(stanza: str) -> dict[str, str]:
    """Return the fields of a Debian control stanza."""
    return dict(HeaderParser().parsestr(stanza).items())


def debian_component(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the component of a Debian package."""
    name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def python_component(metadata: str) -> dict[str, Any]:
    """Return the component of a Python distribution, from its METADATA."""
    fields = HeaderParser().parsestr(metadata)
    name, version = fields["Name"], fields["Version"]
    normal = name.lower().replace("_", "-").replace(".", "-")
    purl = f"pkg:pypi/{quote(normal)}@{quote(version, safe='')}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if expression := fields.get("License-Expression"):
        component["licenses"] = [{"expression": expression}]
    return component


def document(name: str, version: str, components: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bill of materials of an image; equal content gives an equal document."""
    listed = sorted(components, key=lambda component: str(component["bom-ref"]))
    identity = json.dumps([name, version, listed], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, identity)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": f"{name}@{version}",
                "name": name,
                "version": version,
            }
        },
        "components": listed,
    }


def text_of(found: Mapping[str, Any]) -> str:
    """Return the text of a document."""
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def installed(root: Path, site: Iterable[Path]) -> list[dict[str, Any]]:
    """List components of a file system: records of dpkg, and distributions in the *site* folders."""
    status = root / "var/lib/dpkg/status"
    stanzas = status.read_text("utf-8").split("\n\n") if status.exists() else []
    return [
        *(debian_component(control_fields(stanza)) for stanza in stanzas if "\nStatus: install ok" in stanza),
        *(
            python_component(path.read_text("utf-8"))
            for folder in site
            for path in folder.glob("*.dist-info/METADATA")
        ),
    ]


def main() -> None:
    """Print the document of the running image, or of a file system."""
    name, version, *root = sys.argv[1:]
    folders = [] if root else [Path(each) for each in sys.path if each.endswith("-packages")]
    found = document(name, version, installed(Path(*root or "/"), folders))
    sys.stdout.write(text_of(found))


if __name__ == "__main__":
    main()
