"""vLLM's engine in a process of its own, which can be restarted: a tiny model with made-up weights, on a CPU.

The weights are the same in every process, so tokens are, too, unless the KV cache is wrong.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MIB = 1 << 20
CHUNK_TOKENS = 32
ROW_BYTES = 64 << 10
"""What one chunk of this model takes."""
HOST_ROWS = 80
"""Rows of vLLM's host memory: less than what the tests' prompts need together, so that chunks leave it."""
DEVICE_BLOCKS = 80
START_S = 120.0

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


HYBRID_MODEL = MODEL | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
"""A model of two KV groups, one of which keeps a window only."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine made of prompts."""

    tokens: list[list[int]]
    cached: list[int]
    """Tokens of each prompt that were not computed."""
    seconds: float


class EngineError(Exception):
    """The engine did not start, or did not answer in time; its log says why."""


class EngineProcess:
    """An engine. Use it as a context manager: it is stopped in order, and must end well."""

    def __init__(
        self,
        directory: Path,
        name: str,
        tier: dict[str, Any] | None,
        *,
        model_config: dict[str, Any] = MODEL,
    ) -> None:
        """*tier* is the tier's entry in ``secondary_tiers``; None for an engine without offloading."""
        model = directory / str(model_config["model_type"])
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(model_config))
        self.log = directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, str(model), str(self.log), tier))
        self._process.start()
        theirs.close()

    def wait(self) -> Self:
        """Return when the engine is up."""
        self._answer(START_S)
        return self

    def generate(
        self, prompts: Sequence[Sequence[int]], *, within_s: float, together: bool = False
    ) -> Generated:
        """Generate a few tokens for each prompt, one after another or all *together*."""
        self._pipe.send(("generate", [list(prompt) for prompt in prompts], together))
        return Generated(*self._answer(within_s))

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics of the tier, as ``name`` or ``name{label}``, without the common prefix."""
        self._pipe.send(("metrics",))
        return dict(self._answer(30.0))

    def reset(self) -> bool:
        """Forget all KV in the engine and in its host memory, as before an update of the weights."""
        self._pipe.send(("reset",))
        return bool(self._answer(60.0))

    def stop(self) -> int | None:
        """Shut down in order; return the exit code."""
        self._pipe.send(("stop",))
        self._process.join(60)
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


def _run(pipe: Connection, model: str, log: str, tier: dict[str, Any] | None) -> None:
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
    engine = _engine(model, tier)
    pipe.send("up")
    while True:
        match pipe.recv():
            case ("generate", prompts, together):
                pipe.send(_generate(engine, prompts, together=together))
            case ("metrics",):
                pipe.send(_metrics(engine))
            case ("reset",):
                pipe.send(engine.reset_prefix_cache(reset_connector=True))
            case ("stop",):
                engine.llm_engine.engine_core.shutdown()
                return


def _engine(model: str, tier: dict[str, Any] | None) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    offloading = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "tests.vllm.cpu_copy",
        "cpu_bytes_to_use": HOST_ROWS * ROW_BYTES,
        "secondary_tiers": [tier],
    }
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=offloading,
    )
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        seed=0,
        enforce_eager=True,
        max_model_len=1152,
        block_size=CHUNK_TOKENS,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        disable_log_stats=False,
        kv_transfer_config=transfer if tier else None,
    )


def _generate(engine: Any, prompts: list[list[int]], *, together: bool) -> tuple[Any, ...]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    begun_s = time.monotonic()
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    made = [
        output
        for batch in batches
        for output in engine.generate(
            [{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False
        )
    ]
    tokens = [list(output.outputs[0].token_ids) for output in made]
    return tokens, [output.num_cached_tokens for output in made], time.monotonic() - begun_s


def _metrics(engine: Any) -> dict[str, float]:
    prefix = "vllm:kv_offload_ostraca_"
    found = {}
    for metric in engine.get_metrics():
        if metric.name.startswith(prefix):
            labels = [value for name, value in metric.labels.items() if name not in ("model_name", "engine")]
            name = metric.name.removeprefix(prefix) + (f"{{{labels[0]}}}" if labels else "")
            found[name] = metric.value
    return found
