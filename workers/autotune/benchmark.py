"""A benchmark process: loads candidates and times them, as a model process would run them.

One process serves all candidates, so each library is imported once. It is separate, so a candidate
that crashes does no other harm. These functions run in it, one call at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared.catalog import Model
from shared.tasks.embedding import EmbeddingResult
from workers.models.backend import Backend
from workers.models.base import InferenceModel, PreparedText
from workers.models.embedding.model import cut_by_length
from workers.tasks.base import Resources
from workers.tasks.embedding import encoder_model

_SHAPES = ((1, 8), (1, 32), (4, 16), (4, 64), (1, 192))
"""Texts and tokens of the calls that are timed to fit the cost of a call. They differ widely."""
_REPEATS = 3
_CALL_TOKENS_MAX = 16384


class Throughput(NamedTuple):
    """The throughput of one process while it was timed. `tokens` includes padding."""

    texts: int
    tokens: int
    wall_s: float
    cpu_s: float


class BenchmarkTarget(NamedTuple):
    """A candidate to load: a backend, without its call_tokens, and its number of threads."""

    backend: Backend
    threads: int


class _LoadedTarget(NamedTuple):
    model: InferenceModel
    seconds: Callable[[], float]


_opened: dict[BenchmarkTarget, _LoadedTarget] = {}


def open_model(
    entry: Model, folder: Path, target: BenchmarkTarget, device: str, keeps_others: bool
) -> None:
    """Loads a candidate, in addition to earlier ones or instead of them.

    Raises:
        PenstockError: the candidate can't be loaded.
    """
    if target in _opened:
        return
    if not keeps_others:
        _opened.clear()
    model = encoder_model(
        entry, folder, Resources(device=device, backend=target.backend, threads=target.threads)
    )
    model.setup()
    model.warmup()
    # On a CPU its own CPU seconds count, so other programs do not distort the figures.
    _opened[target] = _LoadedTarget(
        model, time.process_time if model.device_name == "cpu" else time.perf_counter
    )


def _loaded(target: BenchmarkTarget) -> _LoadedTarget:
    """The loaded candidate, ready to run."""
    if target.backend.backend == "torch" and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(
            target.threads
        )  # it is global, so the model that was loaded last has set it
    return _opened[target]


def vectors(target: BenchmarkTarget, texts: Sequence[PreparedText], together: int) -> np.ndarray:
    """Vectors, float32 [texts, dimensions], computed `together` at a time in order of length."""
    model = _loaded(target).model
    order = sorted(range(len(texts)), key=lambda index: texts[index].length)
    rows: dict[int, np.ndarray] = {}
    for at in range(0, len(order), together):
        indices = order[at : at + together]
        for index, row in zip(
            indices, _predict(model, [texts[index] for index in indices]), strict=True
        ):
            rows[index] = row
    return np.stack([rows[index] for index in range(len(texts))])


def _predict(model: InferenceModel, texts: Sequence[PreparedText]) -> list[np.ndarray]:
    results = model.predict(texts, lambda step, steps: None)
    return [
        np.frombuffer(result.vector, "<f4")
        for result in results
        if isinstance(result, EmbeddingResult)
    ]


def call_tokens(target: BenchmarkTarget, text: PreparedText, longest: int) -> int:
    """The fixed cost of a call, in tokens: from a least-squares line through the times of _SHAPES.

    It minimizes relative errors, so short calls, which show the cost, weigh as much as long ones.
    """
    opened = _loaded(target)
    times_s, tokens = [], []
    for count, length in _SHAPES:
        batch = [_of_length(text, min(length, longest))] * count
        times_s.append(min(_time_s(opened, batch) for _ in range(_REPEATS)))
        tokens.append(count * batch[0].length)
    lines = np.stack([1 / np.array(times_s), np.array(tokens) / np.array(times_s)], axis=1)
    (per_call_s, per_token_s), *_ = np.linalg.lstsq(lines, np.ones(len(times_s)), rcond=None)
    if per_token_s <= 0:  # more tokens cost nothing: the GPU is far from full
        return _CALL_TOKENS_MAX
    return int(min(max(round(per_call_s / per_token_s), 1), _CALL_TOKENS_MAX))


def _of_length(text: PreparedText, length: int) -> PreparedText:
    repeats = -(-length // text.length)
    return PreparedText(key="", length=length, ids=(text.ids * repeats)[: 4 * length])


def _time_s(opened: _LoadedTarget, batch: Sequence[PreparedText]) -> float:
    began_s = opened.seconds()
    _predict(opened.model, batch)
    return opened.seconds() - began_s


def throughput(
    target: BenchmarkTarget, texts: Sequence[PreparedText], call_cost: int, seconds: float
) -> Throughput:
    """The throughput for `texts`, grouped as in a model process, over at least `seconds`."""
    model = _loaded(target).model
    cut = [list(range(len(texts)))]
    if model.pads:
        cut = cut_by_length([text.length for text in texts], call_cost)
    groups = [[texts[index] for index in indices] for indices in cut]
    tokens = sum(model.computed_work([text.length for text in group]) for group in groups)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    rounds = 0
    while rounds == 0 or time.perf_counter() - began_s < seconds:
        for group in groups:
            _predict(model, group)
        rounds += 1
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Throughput(rounds * len(texts), rounds * tokens, wall_s, cpu_s)
