"""Whether the C library that is loaded is the one that the Python beside it was written for."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from xxhash import _xxhash  # type: ignore[attr-defined]  # its stubs leave the C module out

from ostraca_fabric import native

FOLDER = Path(native.__file__).parent
LIBRARY = FOLDER / native.FILE_NAME

KNOWN = (16, "309ad82821c33e5b")
"""The interface's number, and what its functions and structures looked like under it."""


def looks() -> str:
    """Return a digest of the interface without comments: functions, structures, signatures of ctypes."""
    seen = [repr(sorted(native._SIGNATURES.items()))]
    for path in sorted(FOLDER.rglob("*.[ch]")):
        source = re.sub(r"\s*/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        seen += re.findall(r"^PUBLIC [^{]*", source, re.MULTILINE)
        seen += re.findall(r"^struct \w+ \{.*?^\};", source, re.MULTILINE | re.DOTALL)
    return hashlib.blake2b("\n".join(seen).encode(), digest_size=8).hexdigest()


def test_a_change_of_what_c_and_python_give_each_other_raises_the_interface_s_number() -> None:
    header = re.search(r"#define OSTRACA_INTERFACE (\d+)", (FOLDER / "ostraca.h").read_text())
    assert header is not None
    assert int(header[1]) == native.INTERFACE, "ostraca.h and __init__.py say the same number"
    assert (native.INTERFACE, looks()) == KNOWN, (
        "raise INTERFACE in native/__init__.py and OSTRACA_INTERFACE in ostraca.h, and note both in KNOWN"
    )


def test_the_library_of_another_interface_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.loaded(LIBRARY)[0].ostraca_interface() == native.INTERFACE
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    with pytest.raises(ImportError, match=r"compiled from other sources .*pip install -e \."):
        native.loaded(LIBRARY)


def test_a_library_from_before_there_was_a_number_is_refused() -> None:
    with pytest.raises(ImportError, match="its interface is 0"):
        native.loaded(Path(_xxhash.__file__))


def test_a_library_that_was_never_compiled_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"never installed\. Run `make test`"):
        native.loaded(tmp_path / native.FILE_NAME)
