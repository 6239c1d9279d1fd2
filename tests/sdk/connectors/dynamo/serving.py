"""Dynamo's frontend and vLLM workers as processes, with discovery by files: neither etcd nor NATS."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tests.sdk.connectors.vllm.follower import open_port
from tests.sdk.connectors.vllm.process_group import mapped_files, members
from tests.sdk.connectors.vllm.tiny_model import write_model, write_tokenizer

MODEL_NAME = "tiny"
CHUNK_TOKENS = 32
ROW_BYTES = 128 << 10
"""Bytes of a chunk of the tiny model."""
MEMORY_CHUNKS = 48
"""Chunks in a worker's device memory, and as many in its host memory."""
ANSWER_TOKENS = 8
START_S = 300.0
ANSWER_S = 120.0
END_S = 30.0


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """Answer of a worker, by way of the frontend."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt from caches."""
    worker: int


@dataclass(frozen=True, slots=True)
class RouterDecision:
    """Decision of the router, as its log tells."""

    worker: int
    logit: float
    disk_blocks: int
    """Blocks credited to the worker as on its disk."""
    costs: dict[int, float]
    """The logit of each worker; the lowest wins."""


class UnavailableError(Exception):
    """Refusal of the frontend: no worker answers."""


class GroupProcess:
    """Process with all its children in a group of their own; use as a context manager."""

    def __init__(self, folder: Path, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.log = folder / f"{name}.log"
        home = folder / name
        home.mkdir(exist_ok=True)
        self._command = [sys.executable, "-m", *arguments]
        self._environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[4]),
            "HOME": str(home),
            "TMPDIR": str(home),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_LOGGING_JSONL": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, with a new log."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, process_group=0
            )

    def kill(self) -> None:
        """Kill all processes of the group, and remove the shared memory that they leave behind."""
        if self._process is None:
            return
        group = self._process.pid
        files = mapped_files(group)
        # The tracker outlives the others, and then removes their semaphores.
        for process, command in members(group):
            if "resource_tracker" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self._process.wait()
        self._process = None
        until_s = time.monotonic() + END_S
        while list(members(group)):
            assert time.monotonic() < until_s, list(members(group))
            time.sleep(0.05)
        for file in files:
            file.unlink(missing_ok=True)

    def words(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        """Wait, and fail with the end of the log."""
        until_s = time.monotonic() + within_s
        while not is_done():
            assert self.is_running, self.words()[-4000:]
            assert time.monotonic() < until_s, self.words()[-4000:]
            time.sleep(0.1)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class DynamoWorker(GroupProcess):
    """Dynamo's vLLM worker."""

    def __init__(self, folder: Path, name: str, tier: dict[str, Any] | None) -> None:
        """Prepare a worker. *tier* is the tier's entry; None for a worker without offloading."""
        model = write_tokenizer(write_model(folder / MODEL_NAME))
        self._metrics_port = open_port()
        super().__init__(
            folder,
            name,
            ["tests.sdk.connectors.dynamo.vllm_worker", *worker_options(model, tier)],
            {
                "DYN_SYSTEM_PORT": str(self._metrics_port),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            },
        )

    @property
    def identity(self) -> int:
        """Number of the worker in the router."""
        found = re.search(r'worker_id="([0-9a-f]+)"', self._metrics())
        if not found:
            raise UnavailableError("the worker does not serve yet")
        return int(found[1], 16)

    def until_serving(self) -> None:
        """Wait until the worker has a number."""

        def has_number() -> bool:
            with contextlib.suppress(UnavailableError):
                return self.identity > 0
            return False

        self.until(has_number, within_s=START_S)

    def count(self, metric: str, outcome: str) -> float:
        """Return one of the tier's counters."""
        pattern = rf'^vllm:kv_offload_ostraca_{metric}_total{{.*outcome="{outcome}".*}} (\S+)$'
        return sum(map(float, re.findall(pattern, self._metrics(), re.MULTILINE)))

    def _metrics(self) -> str:
        return fetched(f"http://127.0.0.1:{self._metrics_port}/metrics").decode()


class DynamoFrontend(GroupProcess):
    """Dynamo's HTTP frontend with the KV router."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._url = f"http://127.0.0.1:{(port := open_port())}"
        super().__init__(
            folder,
            "frontend",
            [
                "dynamo.frontend",
                *("--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port", str(port)),
                *options,
            ],
            {"DYN_LOG": "info,dynamo_kv_router::scheduling::selector=trace", **environment},
        )

    def ask(self, prompt: list[int], *, worker: DynamoWorker | None = None) -> ServedAnswer:
        """Return the answer to a prompt, of a given worker or of the router's choice."""
        pinned = {"backend_instance_id": worker.identity} if worker else {}
        answer = self._post(
            prompt, ANSWER_TOKENS, ignore_eos=True, nvext={"extra_fields": ["worker_id"]} | pinned
        )
        words = answer["choices"][0]["text"].split()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ServedAnswer(
            [int(word.removeprefix("t")) for word in words],
            cached,
            answer["nvext"]["worker_id"]["decode_worker_id"],
        )

    def decide(self, prompt: list[int]) -> RouterDecision:
        """Return the router's choice for a prompt, without running the prompt."""
        answer = self._post(prompt, 1, nvext={"annotations": ["query_instance_id:"]})
        request = answer["id"].removeprefix("cmpl-")
        self.until(lambda: bool(self._chosen(request)), within_s=ANSWER_S)
        costs = {each["worker_id"]: each["cost"] for each in self._lines(request, "Scored worker candidate")}
        (chosen,) = self._chosen(request)
        return RouterDecision(chosen["worker_id"], chosen["logit"], chosen["disk_blocks"], costs)

    def until_routing_to(self, *workers: DynamoWorker) -> None:
        """Wait until the router knows these workers, and no others."""
        wanted = {worker.identity for worker in workers}
        dice = random.Random()

        def knows_them() -> bool:
            with contextlib.suppress(UnavailableError):
                prompt = [dice.randrange(3, 1000) for _ in range(CHUNK_TOKENS)]
                return self.decide(prompt).costs.keys() == wanted
            return False

        self.until(knows_them, within_s=START_S)

    def _chosen(self, request: str) -> list[dict[str, Any]]:
        return list(self._lines(request, "Selected worker"))

    def _lines(self, request: str, message: str) -> Iterator[dict[str, Any]]:
        for line in self.words().splitlines():
            if request in line and message in line:
                yield json.loads(line)

    def _post(self, prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
        asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | options
        answer: dict[str, Any] = json.loads(fetched(f"{self._url}/v1/completions", json.dumps(asked)))
        return answer


def worker_options(model: Path, tier: dict[str, Any] | None) -> list[str]:
    """Return the arguments of a worker."""
    options = {
        "--model": str(model),
        "--served-model-name": MODEL_NAME,
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--block-size": str(CHUNK_TOKENS),
        "--num-gpu-blocks-override": str(MEMORY_CHUNKS),
    }
    if tier:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.sdk.connectors.vllm.cpu_copy",
                "cpu_bytes_to_use": MEMORY_CHUNKS * ROW_BYTES,
                "secondary_tiers": [tier],
                "self_describing_kv_events": True,
            },
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{open_port()}",
        }
        options |= {"--kv-transfer-config": json.dumps(transfer), "--kv-events-config": json.dumps(events)}
    return ["--enforce-eager", *(word for option in options.items() for word in option)]


def fetched(url: str, body: str = "") -> bytes:
    """Return the body of an answer over HTTP."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body.encode() or None, headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            read: bytes = answer.read()
            return read
    except urllib.error.HTTPError as error:
        raise UnavailableError(f"{error.code}: {error.read()!r}") from None
    except urllib.error.URLError as error:
        raise UnavailableError(str(error)) from None
