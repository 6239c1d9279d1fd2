"""Bill of materials of an image."""

import json
import site
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from helm.images import sbom

METADATA = (
    "Metadata-Version: 2.4\nName: Zope.Thing\nVersion: 1.0+cpu\nLicense-Expression: MIT\n\nText: none\n"
)


def test_a_bill_lists_packages_of_debian_and_of_python(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: libc6\nStatus: install ok installed\nVersion: 1:2.36\nArchitecture: amd64\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\nArchitecture: all\n\n"
    )
    site = tmp_path / "site"
    (site / "zope.dist-info").mkdir(parents=True)
    (site / "zope.dist-info/METADATA").write_text(METADATA)
    found = sbom.document("ostraca-agent", "0.1.0", sbom.installed(tmp_path, [site]))
    assert [(each["purl"], each.get("licenses")) for each in found["components"]] == [
        ("pkg:deb/debian/libc6@1%3A2.36?arch=amd64", None),
        ("pkg:pypi/zope-thing@1.0%2Bcpu", [{"expression": "MIT"}]),
    ]


def test_equal_content_gives_an_equal_bill_and_other_content_another_number() -> None:
    component = sbom.python_component(METADATA)
    bill = sbom.document("ostraca-agent", "0.1.0", [component])
    assert bill == sbom.document("ostraca-agent", "0.1.0", [component])
    assert bill["serialNumber"] != sbom.document("ostraca-agent", "0.1.0", [])["serialNumber"]


def test_a_bill_follows_the_schema_of_cyclonedx() -> None:
    folders = [Path(each) for each in site.getsitepackages()]
    control = {"Package": "libstdc++6", "Version": "1:12.2-1+b2", "Architecture": "arm64"}
    components = [sbom.debian_component(control), *sbom.installed(Path("/absent"), folders)]
    bill = sbom.document("ostraca-agent", "0.1.0", components)
    assert "numpy" in {each["name"] for each in bill["components"]}
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(sbom.text_of(bill)) is None
    bill["components"][0].pop("name")
    assert validator.validate_str(json.dumps(bill)) is not None, "the schema is in effect"
