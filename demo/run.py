"""`make demo`: a transformer skips its prefill by loading the KV cache from Ostraca.

Exit codes: 0 for success, 1 for a failed check or process, 2 for bad usage, 130 for Ctrl-C.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from demo.document import DOCUMENT_TOKENS, SMALL, ModelSize, document

REPOSITORY = Path(__file__).resolve().parent.parent
PICTURE = REPOSITORY / "docs" / "images" / "demo.svg"
QUICK_TOKENS = 1024
FAILED = 1
INTERRUPTED = 130

NEEDED = ("torch", "transformers", "matplotlib", "rich", "ostraca")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    options = _options(argv)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The demo needs {', '.join(missing)}; install what it needs with: pip install 'ostraca[demo]'\n"
            "or, in a clone of the repository, let `make demo` set everything up.\n"
        )
        return FAILED
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _directory(is_kept=options.keep) as directory:
            return _run(options, directory)
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; every process has ended.\n")
        return INTERRUPTED


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo.run",
        description="Two worker processes share a real transformer's KV cache through a fabric on this "
        "machine, also after half of its flash is destroyed. Every claim is checked; the exit code is 0 if "
        "all hold.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"length of the document: whole pages of 16 tokens (default: {DOCUMENT_TOKENS})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "demo" / "out",
        metavar="DIR",
        help="where the plot goes, as SVG and PNG (default: demo/out)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the fabric's directory and the logs")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a small model and {QUICK_TOKENS} tokens: seconds, and meaningless times",
    )
    parser.add_argument(
        "--update-readme-picture", action="store_true", help=f"also write {PICTURE.relative_to(REPOSITORY)}"
    )
    options = parser.parse_args(argv)
    if options.tokens is None:
        options.tokens = QUICK_TOKENS if options.quick else DOCUMENT_TOKENS
    try:
        document(options.tokens)
    except ValueError as error:
        parser.error(f"--tokens {options.tokens}: {error}")
    if options.update_readme_picture and options.quick:
        parser.error("--update-readme-picture shows what --quick can't measure: leave one of them out")
    return options


def _run(options: argparse.Namespace, directory: Path) -> int:
    from rich.console import Console  # noqa: PLC0415 (main has said what to install when these are missing)

    from demo.plot import draw  # noqa: PLC0415
    from demo.processes import ProcessFailedError  # noqa: PLC0415
    from demo.report import tables  # noqa: PLC0415
    from demo.scenario import Plan, Scenario  # noqa: PLC0415

    console = Console()
    model = SMALL if options.quick else ModelSize()
    scenario = Scenario(Plan(directory, options.tokens, model), console)
    try:
        measured = scenario.run()
    except ProcessFailedError as error:
        console.print(f"✗ {error}", style="red", highlight=False, markup=False)
        return FAILED
    console.print()
    console.print(tables(measured))
    if scenario.failures:
        console.print(f"{len(scenario.failures)} checks failed.", style="red", highlight=False)
        return FAILED
    pictures = [options.out / "demo.svg", options.out / "demo.png"]
    if options.update_readme_picture:
        pictures.append(PICTURE)
    draw(measured, pictures)
    if options.quick:
        console.print("The model was a toy (--quick): the times mean nothing.", style="yellow")
    console.print("Every check passed. The picture:", *pictures, highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _directory(*, is_kept: bool) -> Iterator[Path]:
    """Create a directory on a disk: /tmp is often memory, too small for large files."""
    chosen = os.environ.get("TMPDIR") or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else None)
    path = Path(tempfile.mkdtemp(prefix="ostraca-demo-", dir=chosen))
    try:
        yield path
    finally:
        if is_kept:
            print(f"Kept: {path}")
        else:
            shutil.rmtree(path)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (a handler's signature)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
