"""Steps of the demo in order, with a check of every claim.

A fabric runs in another process. Worker A computes the document's KV cache and puts the pages. Worker B, a
fresh process, answers questions from loaded pages, and then computes the document for comparison. Then the
demo destroys half of the flash under the running fabric, and B answers again twice. The next question
recomputes the missing pages and puts them back; all later questions find every page.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from demo import destroy
from demo.document import ModelSize
from demo.messages import (
    AnswersReport,
    Ask,
    Compare,
    ComparisonReport,
    Question,
    Ready,
    Recompute,
    RecomputeReport,
    Task,
    Write,
    WriteReport,
)
from demo.processes import FabricProcess, WorkerProcess
from demo.results import DemoResults

MIB = 1 << 20
_SEGMENT_BYTES = 64 * MIB
_SPARE_SEGMENTS = 5
"""Segments of each drive beyond the document: free reserve, half-full segments, and the superblock."""

_WAYS = {"nixl": "through NIXL", "inline": "inline, in frames of the connection: NIXL is not installed"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a run."""

    directory: Path
    """Existing, empty directory for the fabric and the logs."""

    tokens: int
    model: ModelSize

    @property
    def drive_bytes(self) -> int:
        """Size of each drive, enough for two copies of the whole document.

        Placement is random: a drive may receive all blocks, and all recomputed blocks again.
        """
        segments = -(-2 * self.tokens * self.model.token_bytes // _SEGMENT_BYTES) + _SPARE_SEGMENTS
        return segments * _SEGMENT_BYTES + MIB


class Scenario:
    """Single run of the demo. `failures` holds a sentence for each failed check."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self.failures: list[str] = []

    def run(self) -> DemoResults:
        """Run all steps; return the results.

        Raises ProcessFailedError for a failed process, as no step can follow. All processes have ended at the
        return.
        """
        plan = self._plan
        with FabricProcess(plan.directory / "fabric", drive_bytes=plan.drive_bytes) as fabric:
            with self._step("starting a fabric"):
                address = fabric.wait_until_ready()
            drives = fabric.ENCLOSURES * fabric.DRIVES
            self._say(
                f"a fabric runs: {fabric.ENCLOSURES} enclosures of {fabric.DRIVES} drives, "
                f"{drives * plan.drive_bytes / 1e9:.1f} GB of flash in files, no DRAM cache"
            )
            task = Task(address, plan.tokens, plan.model)
            with self._worker("worker A", task) as writer:
                written = self._write(writer)
                self._stop(writer)
            with self._worker("worker B", task) as reader:
                measured = self._read(fabric, reader, written)
                self._stop(reader)
            with self._step("stopping the fabric"):
                fabric.stop()
        return measured

    def _write(self, writer: WorkerProcess) -> WriteReport:
        """Let a worker compute and put the document."""
        with self._step("worker A starts"):
            ready = writer.wait_until_ready()
        self._say(
            f"worker A has a Llama of {ready.parameters / 1e6:.0f} M parameters, on {ready.threads} threads; "
            f"blocks cross {_WAYS[ready.transport]}"
        )
        with self._step(f"worker A computes {self._plan.tokens:,} tokens and puts their KV cache"):
            written = writer.execute(Write(), WriteReport)
        put_bytes = ready.blocks * ready.block_bytes
        self._say(
            f"worker A computed {self._plan.tokens:,} tokens in {written.prefill_s:.2f} s and put "
            f"{put_bytes / 1e6:.0f} MB in {written.put_s:.2f} s"
        )
        self._check(
            f"all {ready.blocks} blocks are committed", written.committed == ready.blocks, written.outcome
        )
        return written

    def _read(self, fabric: FabricProcess, reader: WorkerProcess, written: WriteReport) -> DemoResults:
        """Let a worker answer questions, before and after the damage."""
        with self._step("worker B starts"):
            ready = reader.wait_until_ready()
        with self._step("worker B loads the cache and answers"):
            loaded = reader.execute(Ask(), AnswersReport)
        self._check_all_loaded("worker B, a fresh process,", ready, loaded.questions)
        with self._step("worker B computes the document, for comparison"):
            recomputed = reader.execute(Recompute(), RecomputeReport)
        self._check_equal(reader)
        self._destroy(fabric, written)
        with self._step("worker B answers again, recomputes missing pages and puts them back"):
            damaged = reader.execute(Ask(), AnswersReport)
        self._check_damage(ready, damaged)
        self._check_equal(reader)
        with self._step("worker B asks once more"):
            mended = reader.execute(Ask(), AnswersReport)
        self._check_all_loaded("worker B again", ready, mended.questions)
        self._check_equal(reader)
        self._check(
            "no block came from the agent's DRAM, so all came from flash",
            mended.hits_from_dram == 0,
            f"{mended.hits_from_dram} hits came from DRAM",
        )
        return DemoResults(self._plan.tokens, ready, written, recomputed, loaded, damaged, mended)

    def _destroy(self, fabric: FabricProcess, written: WriteReport) -> None:
        """Overwrite each drive of the enclosure with more of the document: half of the flash."""
        blocks = Counter[str]()
        for shard, count in written.shard_blocks.items():
            blocks[shard.partition("/")[0]] += count
        enclosure, count = blocks.most_common(1)[0]
        lost_bytes = 0
        with self._step(f"destroying every drive of {enclosure}"):
            for number, drive in enumerate(destroy.drives(fabric.directory / enclosure)):
                lost_bytes += destroy.overwrite(drive, seed=number)
        total_bytes = fabric.ENCLOSURES * fabric.DRIVES * self._plan.drive_bytes
        self._say(
            f"{enclosure} now holds noise: {lost_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB of flash, "
            f"with {count} of the {sum(blocks.values())} blocks; the fabric was not told"
        )
        self._check(
            "half of the flash is destroyed",
            2 * lost_bytes == total_bytes,
            f"{lost_bytes} of {total_bytes} bytes were overwritten",
        )

    def _check_all_loaded(self, who: str, ready: Ready, questions: Sequence[Question]) -> None:
        self._check(
            f"{who} loaded all {ready.blocks} blocks for each of {len(questions)} questions",
            all(question.loaded == ready.blocks for question in questions),
            *(question.outcome for question in questions),
        )

    def _check_damage(self, ready: Ready, damaged: AnswersReport) -> None:
        """Check for a loss at the first question, and for no loss at later questions."""
        first, *others = damaged.questions
        lost = ready.blocks - first.loaded
        self._check(
            f"{lost} of {ready.blocks} blocks are lost: the first question misses them",
            lost > 0,
            first.outcome,
        )
        self._check(
            f"{first.put_back} blocks are computed again and put back",
            first.put_back >= lost,
            first.put_outcome,
        )
        self._check_all_loaded("after that, worker B", ready, others)

    def _check_equal(self, reader: WorkerProcess) -> None:
        with self._step("worker B compares"):
            compared = reader.execute(Compare(), ComparisonReport)
        self._check(
            f"{compared.bytes_compared / 1e6:,.0f} MB of KV cache and {compared.answers_compared} answers "
            "with their logits equal the recomputed ones, bit for bit",
            not compared.differences,
            *compared.differences,
        )

    def _worker(self, name: str, task: Task) -> WorkerProcess:
        return WorkerProcess(name, task, self._plan.directory / f"{name.replace(' ', '-').lower()}.log")

    def _stop(self, worker: WorkerProcess) -> None:
        with self._step(f"{worker.name} leaves"):
            worker.stop()

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Show the present step. Rare redraws leave the processor to the work."""
        began_s = time.perf_counter()
        with self._console.status(what, refresh_per_second=2):
            yield
        if not self._console.is_terminal:
            self._console.print(f"  {what} ({time.perf_counter() - began_s:.1f} s)", style="dim")

    def _say(self, sentence: str) -> None:
        self._console.print(f"• {sentence}", highlight=False, soft_wrap=True)

    def _check(self, claim: str, is_true: bool, *otherwise: str) -> None:  # noqa: FBT001 (reads as a claim)
        if is_true:
            self._console.print(f"[green]✓[/green] {claim}", highlight=False, soft_wrap=True)
            return
        self.failures.append(claim)
        self._console.print(f"[red]✗ not so:[/red] {claim}", highlight=False, soft_wrap=True)
        for sentence in otherwise:
            self._console.print(f"    {sentence}", highlight=False, markup=False, soft_wrap=True)
