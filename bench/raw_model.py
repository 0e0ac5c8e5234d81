"""The yardstick of `throughput`: the model alone, no server, on texts that are tokenised and sorted beforehand.

The parent half starts child processes and sends them ways to batch; the child half (`python -m bench.raw_model THREADS
FOLDER`) loads MiniLM in torch fp32 and answers each way with nothing but the seconds it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from workers.models.grouping import cut_by_length

WAYS = ("by 4", "by 16", "512 tokens", "1024 tokens", "2048 tokens", "least padding")
"""How sorted texts are cut into batches: by number, by padded tokens, or into the groups of least cost."""
CALL_TOKENS = 20
"""What a call costs besides its tokens, in tokens, for `least padding`."""


class RawModel:
    """The model in child processes, `threads` each, while the context is open; they idle when not asked."""

    def __init__(self, folder: Path, processes: int, threads: int) -> None:
        self._folder = folder
        self._count = processes
        self._threads = threads
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        words = [sys.executable, "-m", "bench.raw_model", str(self._threads), str(self._folder)]
        for _ in range(self._count):
            child = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._children.append(child)
        for child in self._children:
            _answer(child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far."""
        times = [psutil.Process(child.pid).cpu_times() for child in self._children]
        return float(sum(one.user + one.system for one in times))

    def seconds(self, ids: list[list[int]], way: str) -> float:
        """Wall seconds to embed all of `ids`, sorted by length and dealt out evenly to the processes."""
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
    """Cuts texts that are sorted by length into batches, in one of WAYS."""
    if way == "least padding":
        return [[ordered[place] for place in group] for group in cut_by_length([len(i) for i in ordered], CALL_TOKENS)]
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


def _serve(threads: int, folder: str) -> None:
    """The child: holds batches, embeds them when told to."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    held: list[Any] = []
    print("ready", flush=True)
    for question in _questions():
        if "batches" in question:
            held = [_tensors(batch) for batch in question["batches"]]
        else:
            with torch.inference_mode():
                for ids, mask in held:
                    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
                    pooled = states.mean(1) if mask is None else (states * mask[:, :, None]).sum(1) / mask.sum(1, True)
                    torch.nn.functional.normalize(pooled, dim=1)
        print("done", flush=True)


def _questions() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def _tensors(batch: list[list[int]]) -> tuple[Any, Any]:
    """Token ids [texts, longest], and the mask of the same shape or None where nothing is padded."""
    import torch

    longest = max(len(ids) for ids in batch)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch])
    lengths = torch.tensor([len(ids) for ids in batch])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return padded, None if bool(mask.all()) else mask


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
