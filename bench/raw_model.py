"""The baseline for `throughput`: the model without a server, on tokenized and sorted texts.

The parent starts child processes and sends them ways to batch. The child (`python -m
bench.raw_model THREADS FOLDER BACKEND`) loads the model using only the library, without any of our
code, and reports when it has run its batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import psutil

from workers.models.backend import Backend
from workers.models.embedding.model import cut_by_length

WAYS = ("by 4", "by 16", "512 tokens", "1024 tokens", "2048 tokens", "least padding")
"""Ways of batching sorted texts: by count, by padded tokens, or for minimum cost."""
CALL_TOKENS = 20
"""Fixed cost of a call, in tokens, for `least padding`."""


Batch = list[list[int]]
"""Token IDs of several texts whose lengths are as similar as the way of batching allows."""


class RawModel:
    """The model in child processes with `threads` threads each, running while the context is open.

    The processes are idle except during calls to `seconds`.
    """

    def __init__(self, folder: Path, processes: int, threads: int, backend: Backend) -> None:
        self._words = [str(threads), str(folder), msgspec.json.encode(backend).decode()]
        self._count = processes
        self._threads = threads
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        words = [sys.executable, "-m", "bench.raw_model", *self._words]
        for _ in range(self._count):
            child = subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._children.append(child)
        for child in self._children:
            _answer(child)
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def cpu_s(self) -> float:
        times = [psutil.Process(child.pid).cpu_times() for child in self._children]
        return float(sum(process_times.user + process_times.system for process_times in times))

    def seconds(self, ids: list[list[int]], way: str) -> float:
        """Returns the wall-clock seconds all processes take to embed `ids`, sorted by length."""
        ordered = sorted(ids, key=len)
        for number, child in enumerate(self._children):
            batches = cut(ordered[number :: self._count], way)
            _ask(child, {"batches": batches})
        for child in self._children:
            _answer(child)
        began_s = time.perf_counter()
        for child in self._children:
            _ask(child, {"go": True})
        for child in self._children:
            _answer(child)
        return time.perf_counter() - began_s


def cut(ordered: list[list[int]], way: str) -> list[list[list[int]]]:
    """Splits texts sorted by length into batches, using one of WAYS."""
    if way == "least padding":
        return [
            [ordered[place] for place in group]
            for group in cut_by_length([len(i) for i in ordered], CALL_TOKENS)
        ]
    if way.startswith("by "):
        size = int(way.removeprefix("by "))
        return [ordered[at : at + size] for at in range(0, len(ordered), size)]
    budget = int(way.removesuffix(" tokens"))
    batches: list[list[list[int]]] = []
    for ids in ordered:
        if not batches or len(ids) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(ids)
    return batches


def _ask(child: subprocess.Popen[str], question: dict[str, Any]) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(question) + "\n")
    child.stdin.flush()


def _answer(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    if not child.stdout.readline():
        raise RuntimeError("the raw model's process died; its reason is on stderr")


def _serve(threads: int, folder: str, backend: Backend) -> None:
    """Runs the child process: keeps batches, and embeds them on request."""
    prepare = (
        _onnx(threads, backend.graph)
        if backend.backend == "onnx"
        else _torch(threads, folder, backend.precision)
    )
    held: list[Callable[[], object]] = []
    print("ready", flush=True)
    for question in _questions():
        if "batches" in question:
            held = [prepare(batch) for batch in question["batches"]]
        else:
            for embed in held:
                embed()
        print("done", flush=True)


def _questions() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _padded(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns token IDs and mask, both int64 [texts, longest]."""
    lengths = np.array([len(ids) for ids in batch])
    longest = int(lengths.max())
    ids = np.array([ids + [0] * (longest - len(ids)) for ids in batch], np.int64)
    return ids, (np.arange(longest) < lengths[:, None]).astype(np.int64)


def _torch(threads: int, folder: str, precision: str) -> Callable[[Batch], Callable[[], object]]:
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


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=Backend))
