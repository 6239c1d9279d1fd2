"""vLLM's engine in another process, for restarts: a tiny model, on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.sdk.connectors.vllm.tiny_model import MODEL, write_model

MIB = 1 << 20
CHUNK_TOKENS = 32
ROW_BYTES = 128 << 10
"""Bytes of a chunk of this model."""
HOST_ROWS = 80
"""Rows of vLLM's host memory, fewer than the prompts of the tests need, so that chunks are evicted."""
DEVICE_BLOCKS = 80
START_S = 600.0


@dataclass(frozen=True, slots=True)
class Generated:
    """Answers of an engine."""

    tokens: list[list[int]]
    cached: list[int]
    """Tokens of each prompt from caches."""
    seconds: float


class EngineError(Exception):
    """Failure of the engine to start or to answer in time; the log has the reason."""


class EngineProcess:
    """An engine. Use it as a context manager: it is stopped in order, and must end well."""

    def __init__(
        self,
        directory: Path,
        name: str,
        tier: dict[str, Any] | None,
        *,
        model_config: dict[str, Any] = MODEL,
        **options: Any,
    ) -> None:
        """Start an engine.

        *tier* is the tier's entry in ``secondary_tiers``; None for an engine without offloading. *options*
        are the engine's own, and *kv_events* among them is the address of a ZMQ publisher of KV events.
        """
        model = write_model(directory / str(model_config["model_type"]), model_config)
        self.log = directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, str(model), str(self.log), tier, options))
        self._process.start()
        theirs.close()

    def wait(self) -> Self:
        """Return when the engine is up."""
        self._answer(START_S)
        return self

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        within_s: float,
        together: bool = False,
        is_settled: bool = False,
        salt: str | None = None,
        adapter: Path | None = None,
    ) -> Generated:
        """Generate a few tokens for each prompt, one after another or all *together*.

        If *is_settled*, all transfers end before the next prompt. Otherwise vLLM drops whole stores while
        transfers hold the host memory. *adapter* is the folder of a LoRA adapter, and gives it its name.
        """
        listed = [
            {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {}) for prompt in prompts
        ]
        self._pipe.send(("generate", listed, together, is_settled, adapter))
        return Generated(*self._answer(within_s))

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics of the tier, and its back-pressure counters.

        Keys are ``name`` or ``name{label}``, without the common prefix.
        """
        self._pipe.send(("metrics",))
        return dict(self._answer(30.0))

    def reset(self) -> bool:
        """Forget all KV in the engine and in its host memory, as before an update of the weights."""
        self._pipe.send(("reset",))
        return bool(self._answer(60.0))

    def stop(self) -> int | None:
        """Shut down in order; return the exit code."""
        self._pipe.send(("stop",))
        self._process.join(120)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
            self._process.join()
            return
        code = self.stop()
        assert code == 0, f"the engine ended with {code}: {self._tail()}"

    def _answer(self, within_s: float) -> Any:
        until_s = time.monotonic() + within_s
        while not self._pipe.poll(0.1):
            if not self._process.is_alive() or time.monotonic() >= until_s:
                how = "no answer in time" if self._process.is_alive() else "the engine is gone"
                raise EngineError(f"{how}: {self._tail()}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise EngineError(self._tail()) from None

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""


def _run(
    pipe: Connection, model: str, log: str, tier: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {
        # One thread that is bound nowhere: threads that wait for each other are slow on a busy machine.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    engine = _engine(model, tier, options)
    pipe.send("up")
    while True:
        match pipe.recv():
            case ("generate", prompts, together, is_settled, adapter):
                pipe.send(_generate(engine, prompts, adapter, together=together, is_settled=is_settled))
            case ("metrics",):
                pipe.send(_metrics(engine))
            case ("reset",):
                pipe.send(engine.reset_prefix_cache(reset_connector=True))
            case ("stop",):
                engine.llm_engine.engine_core.shutdown()
                return


def _engine(model: str, tier: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    offloading = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tests.sdk.connectors.vllm.cpu_copy",
        "cpu_bytes_to_use": HOST_ROWS * ROW_BYTES,
        "secondary_tiers": [tier],
        "self_describing_kv_events": True,
    }
    endpoint = options.pop("kv_events", None)
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=offloading,
    )
    usual: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": 1152,
        "block_size": CHUNK_TOKENS,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "enable_prefix_caching": True,
        "disable_hybrid_kv_cache_manager": False,
        "disable_log_stats": False,
        "kv_transfer_config": transfer if tier else None,
        "kv_events_config": endpoint and KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint),
    }
    return LLM(**usual | options)


def _generate(
    engine: Any, prompts: list[dict[str, Any]], adapter: Path | None, *, together: bool, is_settled: bool
) -> tuple[Any, ...]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    lora = adapter and LoRARequest(adapter.name, 1 + sum(adapter.name.encode()), str(adapter))
    begun_s = time.monotonic()
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    made = []
    for batch in batches:
        made += engine.generate(batch, sampling, use_tqdm=False, lora_request=lora)
        if is_settled:
            _settle(engine)
    tokens = [list(output.outputs[0].token_ids) for output in made]
    return tokens, [output.num_cached_tokens for output in made], time.monotonic() - begun_s


def _settle(engine: Any) -> None:
    """Step until no transfer is under way, as the process of a served engine does by itself."""
    core = engine.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        engine.llm_engine.step()
        threading.Event().wait(0.001)  # lets the threads of the tier run


def _metrics(engine: Any) -> dict[str, float]:
    found = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:kv_offload_ostraca_").removeprefix("vllm:kv_offload_tiering_")
        if name.startswith("backpressure"):
            found[name] = metric.value
        elif name != metric.name and "tiering" not in metric.name:
            labels = [value for name, value in metric.labels.items() if name not in ("model_name", "engine")]
            found[name + (f"{{{labels[0]}}}" if labels else "")] = metric.value
    return found
