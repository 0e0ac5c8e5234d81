"""The benchmark processes for a choice: as many as the widest layout needs.

A benchmark process loads candidates and times them the way a model process would run them. Each
process serves all candidates, so every library is imported only once. The processes are separate,
so a candidate that crashes does no other harm. The functions they run, one call at a time, come
first in this module.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, ParamSpec, Self, TypeVar, cast

import msgspec
import numpy as np

from shared.errors import ModelFailed, PenstockError
from shared.models.catalog import Model
from shared.models.tasks.embedding import EmbeddingResult
from workers.autotune.choice import Layout
from workers.autotune.hardware import KEPT_OPEN_MAX_BYTES, Machine
from workers.models.backend import Backend
from workers.models.base import InferenceModel, PreparedText
from workers.models.embedding.model import cut_by_length
from workers.runtime.resident_models import weights_bytes
from workers.runtime.template import die_with_parent
from workers.tasks import WORKER_TASKS
from workers.tasks.base import Resources
from workers.tasks.embedding import encoder_model

_SHAPES = ((1, 8), (1, 32), (4, 16), (4, 64), (1, 192))
"""The numbers of texts and tokens in the calls that are timed to estimate a call's cost. They
differ widely on purpose.
"""
_REPEATS = 3
_CALL_TOKENS_MAX = 16384

_loaded_targets: dict[BenchmarkTarget, _LoadedTarget] = {}

OPEN_LIMIT_S = 60.0
"""Time limit for loading, enough to import torch and load the weights on a busy machine."""
CALL_LIMIT_S = 60.0

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class Throughput(NamedTuple):
    """The measured throughput of one process."""

    texts: int
    wall_s: float
    cpu_s: float


class BenchmarkTarget(NamedTuple):
    """A candidate to load: a backend without its call_tokens, and a thread count."""

    backend: Backend
    threads: int


class _LoadedTarget(NamedTuple):
    model: InferenceModel
    seconds: Callable[[], float]


def open_model(
    entry: Model,
    folder: Path,
    target: BenchmarkTarget,
    device: str,
    memory_fraction: float,
    keeps_others: bool,
) -> None:
    """Loads a candidate, either alongside earlier candidates or in place of them.

    Raises:
        PenstockError: the candidate can't be loaded.
    """
    if target in _loaded_targets:
        return
    if not keeps_others:
        _loaded_targets.clear()
    resources = Resources(
        device=device,
        backend=target.backend,
        threads=target.threads,
        memory_fraction=memory_fraction,
    )
    make = WORKER_TASKS[entry.task].model if entry.rerank == "cross-encoder" else encoder_model
    model = cast(InferenceModel, make(entry, folder, resources))
    model.setup()
    model.warmup()
    # On a CPU, it measures their own CPU seconds, so other programs don't distort the figures.
    _loaded_targets[target] = _LoadedTarget(
        model, time.process_time if model.device_name == "cpu" else time.perf_counter
    )


def _load_target(target: BenchmarkTarget) -> _LoadedTarget:
    if target.backend.backend == "torch" and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(target.threads)  # this is global, so the last loaded model has set it
    return _loaded_targets[target]


def vectors(target: BenchmarkTarget, texts: Sequence[PreparedText], together: int) -> np.ndarray:
    """Returns vectors, float32 [texts, dimensions], `together` texts at a time, by length."""
    model = _load_target(target).model
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
    """Returns a call's fixed cost in tokens, from a least-squares fit to the times of _SHAPES.

    It minimizes relative errors, so short calls, which reveal the fixed cost, count as much as long
    ones.
    """
    loaded = _load_target(target)
    times_s, tokens = [], []
    for count, length in _SHAPES:
        batch = [_of_length(text, min(length, longest))] * count
        times_s.append(min(_time_s(loaded, batch) for _ in range(_REPEATS)))
        tokens.append(count * batch[0].length)
    lines = np.stack([1 / np.array(times_s), np.array(tokens) / np.array(times_s)], axis=1)
    (per_call_s, per_token_s), *_ = np.linalg.lstsq(lines, np.ones(len(times_s)), rcond=None)
    if per_token_s <= 0:  # more tokens cost nothing extra because the GPU is far from saturated
        return _CALL_TOKENS_MAX
    return int(min(max(round(per_call_s / per_token_s), 1), _CALL_TOKENS_MAX))


def device_name(target: BenchmarkTarget) -> str:
    """Returns the name of the device on which a loaded candidate computes."""
    return _load_target(target).model.device_name


def call_s(target: BenchmarkTarget, text: PreparedText) -> float:
    """Returns how many seconds a call with one short text takes."""
    loaded, batch = _load_target(target), [_of_length(text, _SHAPES[0][1])]
    return min(_time_s(loaded, batch) for _ in range(_REPEATS))


def peak_memory_bytes(target: BenchmarkTarget) -> int:
    """Returns this process's peak memory, or its peak GPU memory if it uses a GPU."""
    if _load_target(target).model.device_name == "cpu" or "torch" not in sys.modules:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(sys.modules["torch"].cuda.max_memory_allocated())


def _of_length(text: PreparedText, length: int) -> PreparedText:
    repeats = -(-length // text.length)
    return PreparedText(key="", length=length, ids=(text.ids * repeats)[: 4 * length])


def _time_s(loaded: _LoadedTarget, batch: Sequence[PreparedText]) -> float:
    began_s = loaded.seconds()
    _predict(loaded.model, batch)
    return loaded.seconds() - began_s


def throughput(
    target: BenchmarkTarget, texts: Sequence[PreparedText], call_cost: int, seconds: float
) -> Throughput:
    """Returns the throughput for `texts`, grouped as in a model process, for `seconds` or more."""
    model = _load_target(target).model
    batches = [list(range(len(texts)))]
    if model.pads:
        batches = cut_by_length([text.length for text in texts], call_cost)
    groups = [[texts[index] for index in indices] for indices in batches]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    rounds = 0
    while rounds == 0 or time.perf_counter() - began_s < seconds:
        for group in groups:
            _predict(model, group)
        rounds += 1
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Throughput(rounds * len(texts), wall_s, cpu_s)


class BenchmarkPool:
    """Benchmark processes for one model.

    A context manager. `open` replaces processes that died or hung.

    They are forked from a server that imports the libraries once. Small models stay loaded together
    so that they can be timed in alternation. For a large model, or on a GPU, only the last
    candidate stays loaded.

    Every method raises ModelFailed if a process died or took too long, and also raises the model's
    own errors.

    Args:
        libraries: modules to import before the processes are forked.
    """

    def __init__(
        self,
        entry: Model,
        folder: Path,
        device: str,
        machine: Machine,
        libraries: Sequence[str] = (),
        memory_fraction: float = 1.0,
    ) -> None:
        self._entry = entry
        self._folder = folder
        self._device = device
        self._machine = machine
        self._memory_fraction = memory_fraction
        self._is_gpu = machine.computes_on_gpu(device)
        self.keeps_several = not self._is_gpu and weights_bytes(folder) <= KEPT_OPEN_MAX_BYTES
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workers.autotune.benchmark_pool", *libraries])
        self._executors: list[ProcessPoolExecutor] = []
        self._opened_targets: set[tuple[int, BenchmarkTarget]] = set()
        self._target = BenchmarkTarget(Backend(), 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        # Kills the processes first, because a shutdown would otherwise wait for calls that hang.
        for process in multiprocessing.active_children():
            process.kill()
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)
        self._executors = []
        self._opened_targets.clear()

    def open(self, backend: Backend, layout: Layout) -> None:
        """Loads `backend` in every process of `layout`, for use by the other methods."""
        target = self._target = BenchmarkTarget(
            msgspec.structs.replace(backend, call_tokens=0), layout.threads
        )
        while len(self._executors) < layout.processes:
            # The forkserver that forks the processes exits along with this process.
            executor = ProcessPoolExecutor(1, self._context, initializer=die_with_parent)
            self._executors.append(executor)
        missing = [
            number
            for number in range(layout.processes)
            if (number, target) not in self._opened_targets
        ]
        futures = [
            self._executors[number].submit(
                open_model,
                self._entry,
                self._folder,
                target,
                self._device_of(number),
                self._memory_fraction,
                self.keeps_several,
            )
            for number in missing
        ]
        if not self.keeps_several:
            self._opened_targets = {
                (number, other) for number, other in self._opened_targets if number not in missing
            }
        self._gather(futures, OPEN_LIMIT_S)
        self._opened_targets |= {(number, target) for number in missing}

    def _device_of(self, number: int) -> str:
        """Returns a process's device. Processes are spread over GPUs as in ModelPool."""
        gpus = len(self._machine.gpus)
        is_spread = self._device in ("auto", "cuda") and gpus
        return f"cuda:{number % gpus}" if is_spread else self._device

    def vectors(self, texts: Sequence[PreparedText], together: int) -> np.ndarray:
        return self._ask_first(vectors, self._target, texts, together)

    def call_tokens(self, text: PreparedText, longest: int) -> int:
        return self._ask_first(call_tokens, self._target, text, longest)

    def call_s(self, text: PreparedText) -> float:
        return self._ask_first(call_s, self._target, text)

    def peak_memory_bytes(self) -> int:
        return self._ask_first(peak_memory_bytes, self._target)

    def device_name(self) -> str:
        return self._ask_first(device_name, self._target)

    def texts_per_s(
        self, texts: Sequence[PreparedText], call_cost: int, layout: Layout, seconds: float
    ) -> float:
        """Returns the combined rate of all processes in `layout`."""
        futures = [
            executor.submit(throughput, self._target, texts, call_cost, seconds)
            for executor in self._executors[: layout.processes]
        ]
        measured = self._gather(futures, CALL_LIMIT_S)
        cores = self._machine.cores
        if self._is_gpu or (layout.threads > 1 and layout.processes < cores):
            return sum(each.texts / each.wall_s for each in measured)
        # The processes keep the cores busy, so their CPU seconds show the rate on an otherwise idle
        # machine.
        rate = sum(each.texts / each.cpu_s for each in measured)
        return rate * min(1.0, cores / layout.processes)

    def _ask_first(
        self, ask: Callable[Given, Answer], *args: Given.args, **named: Given.kwargs
    ) -> Answer:
        return self._gather([self._executors[0].submit(ask, *args, **named)], CALL_LIMIT_S)[0]

    def _gather(self, futures: Sequence[Future[Answer]], limit_s: float) -> list[Answer]:
        try:
            return [future.result(limit_s) for future in futures]
        except TimeoutError as error:
            self._end()
            raise ModelFailed(f"timed out after {limit_s:g} s") from error
        except BrokenProcessPool as error:
            self._end()
            raise ModelFailed("its process died") from error
        except PenstockError:
            raise
        except Exception as error:
            # The boundary with the model libraries. An error rules out only this candidate.
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
