"""Bill of materials of an image."""

from pathlib import Path

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
