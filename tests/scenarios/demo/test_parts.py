"""Parts of the demo: comparison, destruction, report and picture."""

from pathlib import Path

import pytest
import torch
from demo import run
from demo.connector import runs
from demo.destroy import drives, overwrite
from demo.messages import AnswersReport, Question, Ready, RecomputeReport, Task, WriteReport
from demo.model import Answer
from demo.plot import draw
from demo.processes import ProcessFailedError, WorkerProcess
from demo.report import tables
from demo.results import DemoResults, middle
from demo.worker import CacheDigest, differences
from rich.console import Console

DIGESTS = (b"a", b"b", b"c")


def answered(tokens: bytes, logit: float = 0.5) -> Answer:
    return Answer(tuple(tokens), torch.full((len(tokens), 4), logit), first_token_s=0.1)


def test_equal_caches_and_answers_have_no_differences() -> None:
    assert differences(CacheDigest(DIGESTS, answered(b"yes")), CacheDigest(DIGESTS, answered(b"yes"))) == []


def test_each_difference_is_said_in_a_sentence() -> None:
    recomputed = CacheDigest(DIGESTS, answered(b"yes"))
    assert differences(CacheDigest((b"a", b"?", b"!"), answered(b"yes")), recomputed) == [
        "the bytes of 2 blocks differ, the first of them block 1"
    ]
    assert differences(CacheDigest(DIGESTS, answered(b"no!")), recomputed) == [
        "the answer is b'no!', and after recomputing b'yes'"
    ]
    assert differences(CacheDigest(DIGESTS, answered(b"yes", logit=0.75)), recomputed) == [
        "the tokens are equal, but their logits differ, by up to 0.25"
    ]


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([], []),
        ([5], [range(5, 6)]),
        ([0, 1, 2, 7, 9, 10], [range(3), range(7, 8), range(9, 11)]),
    ],
)
def test_pages_are_put_in_runs_of_neighbours(pages: list[int], expected: list[range]) -> None:
    assert runs(pages) == expected


def test_destroying_a_drive_leaves_nothing_but_its_size(tmp_path: Path) -> None:
    size_bytes = (8 << 20) + 12345
    drive = tmp_path / "drive-0.img"
    drive.write_bytes(bytes(size_bytes))
    (tmp_path / "other").write_bytes(b"stays")
    assert drives(tmp_path) == [drive]
    assert overwrite(drive, seed=1) == size_bytes
    noise = drive.read_bytes()
    assert len(noise) == size_bytes
    zeros = sum(not any(noise[first : first + 64]) for first in range(0, size_bytes, 64))
    assert zeros == 0
    assert (tmp_path / "other").read_bytes() == b"stays"


def question(total_s: float, *, loaded: int = 256) -> Question:
    recompute_s = 0.0 if loaded == 256 else 3.0
    return Question(
        listed=256,
        loaded=loaded,
        outcome="",
        recomputed=256 - loaded,
        lookup_s=0.0,
        load_s=0.25,
        recompute_s=recompute_s,
        first_token_s=0.1,
        total_s=total_s,
        put_back=256 - loaded,
        put_outcome="",
    )


@pytest.fixture
def measured() -> DemoResults:
    asked = AnswersReport(tuple(map(question, (0.5, 0.4, 0.8, 0.6))), hits_from_dram=0)
    return DemoResults(
        tokens=4096,
        ready=Ready(transport="nixl", parameters=82_000_000, threads=2, blocks=256, block_bytes=1 << 20),
        written=WriteReport(prefill_s=5.0, put_s=0.5, outcome="", committed=256, shard_blocks={}),
        recomputed=RecomputeReport(prefill_s=4.9, first_token_s=(0.1, 0.1, 0.2, 0.1)),
        loaded=asked,
        damaged=AnswersReport((question(3.5, loaded=96), *asked.questions[1:]), hits_from_dram=0),
        mended=asked,
    )


def test_figures_follow_from_what_was_measured(measured: DemoResults) -> None:
    assert measured.document_bytes == 256 << 20
    assert measured.lost_blocks == 160
    assert measured.recomputed_s == pytest.approx((5.0, 5.0, 5.1, 5.0))
    assert measured.ratios(measured.loaded) == pytest.approx((10.0, 12.5, 6.375, 5.0 / 0.6))
    assert middle(measured.loaded).total_s == 0.5
    assert measured.ratio(measured.loaded) == pytest.approx(10.0)
    assert measured.load_gbps(measured.loaded)[0] == pytest.approx((256 << 20) / 1e9 / 0.25)


def test_the_tables_fit_a_narrow_terminal(measured: DemoResults) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(tables(measured))
    shown = capture.get()
    assert "…" not in shown
    for cells in (
        ("Q1", "4,096", "268 MB", "5.00 s", "500 ms", "10.0×", "250 ms", "1.07"),
        ("median", "4,096", "268 MB", "5.00 s", "500 ms", "10.0×", "250 ms", "1.07"),
        ("Q1", "256", "96", "160", "160", "3.50 s", "1.4×"),
    ):
        assert " ".join(cells) in "\n".join(" ".join(line.split()) for line in shown.splitlines())


def test_the_same_measurements_give_the_same_picture(measured: DemoResults, tmp_path: Path) -> None:
    pictures = [tmp_path / "one" / "demo.svg", tmp_path / "other.svg", tmp_path / "demo.png"]
    draw(measured, pictures)
    svg, other, png = (picture.read_bytes() for picture in pictures)
    assert svg == other
    assert svg.startswith(b"<?xml")
    assert png.startswith(b"\x89PNG")


def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "NEEDED", ("rich", "no_such_package"))
    assert run.main([]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no_such_package; install what it needs with: pip install 'ostraca[demo]'" in shown.err
    assert "rich" not in shown.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tokens", "many"], "invalid int value"),
        (["--tokens", "0"], "a multiple of 16"),
        (["--tokens", "100"], "a multiple of 16"),
        (["--tokens", "65536"], "the text has"),
        (["--quick", "--update-readme-picture"], "leave one of them out"),
    ],
)
def test_bad_usage_says_what_is_wrong(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_finds_no_fabric_says_so_and_shows_its_log(tmp_path: Path) -> None:
    task = Task(f"unix://{tmp_path}/nobody.sock")
    with (
        WorkerProcess("worker A", task, tmp_path / "worker.log") as worker,
        pytest.raises(
            ProcessFailedError,
            match=r"(?s)worker A failed \(.*: no agent could be reached.*\n.*Traceback",
        ) as caught,
    ):
        worker.wait_until_ready()
    assert "nobody.sock" in str(caught.value)
