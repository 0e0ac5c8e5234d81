"""The baseline for `throughput`: the model without a server, on tokenized and sorted texts.

Child processes load the model using only the library, without any of our code, and run batches
that were cut for the least cost.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from workers.models.backend import Backend
from workers.models.embedding.model import cut_by_length

CALL_TOKENS = 20
"""Fixed cost of a call, in tokens."""
Batch = list[list[int]]
"""Token IDs of texts with similar lengths."""
_prepare: Callable[[Batch], Callable[[], object]]
"""Prepares a batch for this process's model. Set once the process has loaded it."""
_held: list[Callable[[], object]] = []
"""This process's batches, ready to run."""


class RawModel:
    """The model in child processes with `threads` threads each, running while the context is open.

    The processes are idle except during calls to `seconds`.
    """

    def __init__(self, folder: Path, processes: int, threads: int, backend: Backend) -> None:
        context = multiprocessing.get_context("spawn")
        self._children = [
            ProcessPoolExecutor(1, context, _load, (threads, folder, backend))
            for _ in range(processes)
        ]

    def __enter__(self) -> Self:
        pids = [child.submit(os.getpid) for child in self._children]
        self._processes = [psutil.Process(pid.result()) for pid in pids]
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.shutdown()

    def cpu_s(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._processes))

    def seconds(self, ids: list[list[int]]) -> float:
        """Returns the wall-clock seconds all processes take to embed `ids`, sorted by length."""
        ordered = sorted(ids, key=len)
        shares = [ordered[at :: len(self._children)] for at in range(len(self._children))]
        for child, share in zip(self._children, shares, strict=True):
            child.submit(_hold, cut(share)).result()
        began_s = time.perf_counter()
        for run in [child.submit(_run) for child in self._children]:
            run.result()
        return time.perf_counter() - began_s


def cut(ordered: Sequence[list[int]]) -> list[Batch]:
    """Splits texts sorted by length into batches with the least padding and few calls."""
    groups = cut_by_length([len(ids) for ids in ordered], CALL_TOKENS)
    return [[ordered[place] for place in group] for group in groups]


def _load(threads: int, folder: Path, backend: Backend) -> None:
    global _prepare
    if backend.backend == "onnx":
        _prepare = _onnx(threads, backend.graph)
    else:
        _prepare = _torch(threads, folder, backend.precision)


def _hold(batches: Sequence[Batch]) -> None:
    _held[:] = map(_prepare, batches)


def _run() -> None:
    for embed in _held:
        embed()


def _padded(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns token IDs and mask, both int64 [texts, longest]."""
    lengths = np.array([len(ids) for ids in batch])
    longest = int(lengths.max())
    ids = np.array([ids + [0] * (longest - len(ids)) for ids in batch], np.int64)
    return ids, (np.arange(longest) < lengths[:, None]).astype(np.int64)


def _torch(threads: int, folder: Path, precision: str) -> Callable[[Batch], Callable[[], object]]:
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    model = AutoModel.from_pretrained(folder, dtype=kinds[precision], local_files_only=True).eval()

    def prepare(batch: Batch) -> Callable[[], object]:
        ids, mask = (torch.from_numpy(array) for array in _padded(batch))
        # Without a mask, attention takes a faster path.
        attention_mask = None if bool(mask.all()) else mask
        return partial(embed, ids, attention_mask)

    @torch.inference_mode()
    def embed(ids: Any, mask: Any) -> object:
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (
            states.mean(1)
            if mask is None
            else (states * mask[:, :, None]).sum(1) / mask.sum(1, True)
        )
        return torch.nn.functional.normalize(pooled, dim=1)

    return prepare


def _onnx(threads: int, graph: str) -> Callable[[Batch], Callable[[], object]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def embed(ids: np.ndarray, mask: np.ndarray) -> object:
        states = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    return lambda batch: partial(embed, *_padded(batch))
