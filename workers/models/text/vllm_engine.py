"""Opens an engine of vLLM for a text model: its options, and what they follow from.

vLLM is not installed with Penstock, because its versions pin other libraries. This was written for
0.32.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from shared.catalog import Model
from shared.errors import ConfigurationError
from workers.models.device import memory_errors
from workers.models.text.vocabulary import Vocabulary

_BLOCK_TOKENS = 32
_GPU_MEMORY_SHARE = 0.9
_FP32_BYTES = 4
_ENVIRONMENT = {
    # The engine runs in this process, so that a step is a call.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Cores are given out by the worker.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def import_vllm() -> Any:
    """The package `vllm`, set up for an engine in this process.

    Raises:
        ConfigurationError: it is not installed here.
    """
    os.environ.update(_ENVIRONMENT)
    try:
        import vllm
        import vllm.config
        import vllm.exceptions
        import vllm.sampling_params
    except ImportError as error:
        raise ConfigurationError(
            f"backend vllm needs vLLM in the environment of the worker: {error}", field="backend"
        ) from error
    return vllm


def open_engine(
    vllm: Any, entry: Model, vocabulary: Vocabulary, device: str, memory_fraction: float
) -> Any:
    """An `LLMEngine` that has loaded the model.

    Args:
        vllm: the package.
        entry: the catalog's.
        vocabulary: of the model's folder.
        device: `cpu`, or the kind of GPU.
        memory_fraction: the part of the GPU's memory that it may take.

    Raises:
        ConfigurationError: vLLM can't compute this model.
    """
    try:
        with memory_errors():
            arguments = _arguments(vllm, entry, vocabulary, device, memory_fraction)
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    except (ValueError, TypeError, NotImplementedError, KeyError, OSError) as error:
        raise ConfigurationError(
            f"{vocabulary.folder}: vLLM can't compute it: {error}", field="source"
        ) from error


def _arguments(
    vllm: Any, entry: Model, vocabulary: Vocabulary, device: str, memory_fraction: float
) -> dict[str, Any]:
    budget = entry.batch.max_tokens or entry.generation.context_tokens
    items = min(entry.batch.max_items, budget)
    # Room for the budget, with a block of each text that is not full.
    blocks = -(-budget // _BLOCK_TOKENS) + items + 1
    is_cpu = device == "cpu"
    return {
        "model": str(vocabulary.folder),
        "dtype": _DTYPES[entry.precision],
        "max_model_len": entry.generation.context_tokens,
        "max_num_seqs": items,
        "max_num_batched_tokens": entry.generation.chunk_tokens + items,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "block_size": _BLOCK_TOKENS,
        "num_gpu_blocks_override": blocks,
        "gpu_memory_utilization": min(_GPU_MEMORY_SHARE, memory_fraction),
        # Without it vLLM wants the share above of the whole machine to be free on a CPU.
        "kv_cache_memory_bytes": _cache_bytes(vocabulary.config, blocks) if is_cpu else None,
        # The library of our engine. Its JSON has no spaces between two parts: some models would
        # write spaces until their tokens end.
        "structured_outputs_config": vllm.config.StructuredOutputsConfig(
            backend="guidance", disable_any_whitespace=True
        ),
        # Compiling for a CPU needs a compiler.
        "enforce_eager": is_cpu and shutil.which("g++") is None,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "seed": 0,
    }


def _cache_bytes(config: dict[str, Any], blocks: int) -> int | None:
    """What keys and values take in fp32, which is the most. None: not known of this model."""
    try:
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        values = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
    except (KeyError, TypeError):
        return None
    return int(2 * values * _FP32_BYTES * blocks * _BLOCK_TOKENS)
