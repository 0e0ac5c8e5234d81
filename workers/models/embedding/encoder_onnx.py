"""The ONNX Runtime encoder for embedding models.

It pools and normalizes in numpy, and never imports torch. A model process that uses it starts in
well under a second and needs a fraction of the memory that torch does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from shared.errors import ConfigurationError, ModelFailed
from workers.models.base import OutOfMemory
from workers.models.embedding.model import pad_texts
from workers.models.embedding.model_folder import SentenceFolder
from workers.models.gpus import VARIABLE, gpu_variables
from workers.models.processors import has_vnni

_ASK_GPU_LIMIT_S = 10.0
_SLOW_ON_CPU = ["SkipLayerNormFusion"]
"""The fused operator takes 1 ms for 512 tokens with MiniLM.

A separate addition and layer norm take 0.13 ms.
"""
_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


class OnnxEncoder:
    """A transformer graph from `input_ids`, `attention_mask` and any `token_type_ids` to states.

    The states are the first output, [items, longest, width]. Their type may be narrower than
    float32.
    """

    device_name = ""
    pads = True
    overlaps = False

    def __init__(
        self,
        settings: SentenceFolder,
        graph: Path,
        *,
        device: str,
        threads: int,
        memory_fraction: float = 1.0,
    ) -> None:
        self._settings = settings
        self._graph = graph
        self._wanted = device
        self._threads = threads
        self._memory_fraction = memory_fraction

    def open(self) -> int:
        """Loads the graph. Returns the vectors' dimensions.

        Raises:
            ConfigurationError: the graph can't be loaded, or the device doesn't exist.
        """
        provider, self.device_name = self._provider()
        try:
            self._session = onnxruntime.InferenceSession(
                str(self._graph),
                session_options(self._threads),
                providers=[provider],
                disabled_optimizers=_SLOW_ON_CPU if self.device_name == "cpu" else [],
            )
        except Exception as error:  # the library's errors share no more specific base class
            raise ConfigurationError(f"{self._graph}: {error}", field="backend") from error
        self._inputs = {
            tensor.name: _TYPES.get(tensor.type, np.int64) for tensor in self._session.get_inputs()
        }
        output = self._session.get_outputs()[0]
        self._output = output.name
        if not isinstance(output.shape[-1], int):
            raise ConfigurationError(
                f"{self._graph}: does not specify the width of {output.name}", field="backend"
            )
        return output.shape[-1] * len(self._settings.pooling)

    def _provider(self) -> tuple[tuple[str, dict[str, str]], str]:
        """Returns the execution provider with its options, and the device's name."""
        has_cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        wanted = self._wanted if self._wanted != "auto" else "cuda" if has_cuda else "cpu"
        kind, _, number = wanted.partition(":")
        if kind == "cpu":
            return ("CPUExecutionProvider", {}), "cpu"
        if kind != "cuda" or not has_cuda:
            raise ConfigurationError(
                f"device {wanted!r}: this ONNX Runtime does not have the required provider",
                field="device",
            )
        name, memory_bytes = _ask_gpu(f"cuda:{number or 0}")
        limit = str(int(memory_bytes * self._memory_fraction))
        return ("CUDAExecutionProvider", {"device_id": number or "0", "gpu_mem_limit": limit}), name

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        return max(lengths) * len(lengths)

    def encode(self, ids: np.ndarray, types: np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
        """Encodes the token IDs of joined texts to float32 [items, dimensions].

        See Encoder in model.py.
        """
        padded, mask = pad_texts(ids, lengths)
        padded_types = None if types is None else pad_texts(types, lengths)[0]
        states = self._run(
            {"input_ids": padded, "attention_mask": mask} | self._types(padded, padded_types)
        )
        vectors = np.concatenate(
            [pool(mode, states, mask, lengths) for mode in self._settings.pooling], axis=1
        )
        if self._settings.normalize:
            # The same floor as torch.nn.functional.normalize.
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors

    def _types(self, ids: np.ndarray, types: np.ndarray | None) -> dict[str, np.ndarray]:
        if "token_type_ids" in self._inputs:
            return {"token_type_ids": np.zeros_like(ids) if types is None else types}
        if types is not None and types.any():
            raise ModelFailed("the graph was exported without token types")
        return {}

    def _run(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the states for these arrays, float32 [items, longest, width]."""
        feeds = {
            name: array.astype(self._inputs[name], copy=False) for name, array in arrays.items()
        }
        try:
            if self.device_name == "cpu":
                states = self._session.run([self._output], feeds)[0]
            else:
                states = self._run_bound(feeds)
        except Exception as error:  # the library's errors share no more specific base class
            if "Failed to allocate memory" in str(error) or "BFCArena" in str(error):
                raise OutOfMemory(str(error)) from error
            raise ModelFailed(f"ONNX Runtime: {error}") from error
        return np.asarray(states).astype(np.float32, copy=False)

    def _run_bound(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """Same as `_run`, with inputs and output bound to the GPU: one copy in each direction."""
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        binding.bind_output(self._output, "cuda")
        self._session.run_with_iobinding(binding)
        return np.asarray(binding.copy_outputs_to_cpu()[0])


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Returns all sessions' options: `threads`, and settings for identical results on any CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A memory plan is kept for each shape, and padded batches have hundreds of shapes.
    options.enable_mem_pattern = False
    # Spinning threads take cores away from the I/O process and from other model processes.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not has_vnni():
        # Products of unsigned activations and signed weights would saturate at 16 bits, reducing
        # accuracy. This makes ONNX Runtime use unsigned weights, whose products are exact. With
        # VNNI, these products cost 50% more.
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 3
    return options


def _ask_gpu(device: str) -> tuple[str, int]:
    """Returns a GPU's name and its memory in bytes."""
    words = [
        "nvidia-smi",  # counts the GPUs that CUDA hides, too
        f"--id={gpu_variables(device)[VARIABLE]}",
        "--query-gpu=name,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        output = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=_ASK_GPU_LIMIT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"device {device}: not found by nvidia-smi ({error})", field="device"
        ) from error
    name, _, memory_mib = output.strip().rpartition(",")
    return name.strip(), int(memory_mib) * 1024 * 1024


def pool(mode: str, states: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Pools states [items, tokens, width] to [items, width], in one of the POOLING_MODES.

    `mask` is [items, tokens], and `lengths` is [items]. The formulas match those in
    sentence-transformers.
    """
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return np.asarray(np.where(mask[:, :, None], states, np.float32("-inf")).max(axis=1))
    # A matrix product, [items, 1, tokens] by [items, tokens, width], is faster than a masked sum.
    # BLAS adds pairwise.
    sums = np.matmul(mask[:, None, :].astype(np.float32), states)[:, 0]
    counts = lengths[:, None].astype(np.float32)
    return np.asarray(sums / (np.sqrt(counts) if mode == "mean_sqrt_len_tokens" else counts))
