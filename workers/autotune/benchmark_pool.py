"""The benchmark processes of a choice: as many as the widest layout needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import msgspec
import numpy as np

from shared.catalog import Model
from shared.errors import ModelFailed, PenstockError
from workers.autotune import benchmark
from workers.autotune.choice import Layout
from workers.autotune.contest import Timing
from workers.autotune.hardware import KEPT_OPEN_MAX_BYTES, Machine
from workers.models.backend import Backend
from workers.models.base import PreparedText
from workers.runtime.resident_models import weights_bytes
from workers.runtime.template import die_with_parent

OPEN_LIMIT_S = 60.0
"""Enough to import torch and load the weights on a busy machine."""
CALL_LIMIT_S = 60.0

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class BenchmarkPool:
    """Benchmark processes for one model.

    A context manager. `open` replaces processes that died or hung.

    They are forked from a server that imports the libraries once. Small models stay loaded
    together, so that they can be timed alternately. Of a large model, or on a GPU, only the last
    candidate stays.

    Raises (every method): ModelFailed if a process died or took too long, and the errors of the
    model.

    Args:
        entry: the catalog entry.
        folder: the model's files.
        device: as WorkerSettings.device.
        machine: this one.
        libraries: modules to import before the processes are forked.
    """

    def __init__(
        self,
        entry: Model,
        folder: Path,
        device: str,
        machine: Machine,
        libraries: Sequence[str] = (),
    ) -> None:
        self._entry = entry
        self._folder = folder
        self._device = device
        self._machine = machine
        self._is_gpu = machine.computes_on_gpu(device)
        self.keeps_several = not self._is_gpu and weights_bytes(folder) <= KEPT_OPEN_MAX_BYTES
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["workers.autotune.benchmark", *libraries])
        self._executors: list[ProcessPoolExecutor] = []
        self._opened: set[tuple[int, benchmark.BenchmarkTarget]] = set()
        self._target = benchmark.BenchmarkTarget(Backend(), 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        # Kills the processes first, because a shutdown waits for calls that hang.
        for process in multiprocessing.active_children():
            process.kill()
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)
        self._executors = []
        self._opened.clear()

    def open(self, backend: Backend, layout: Layout) -> None:
        """Loads `backend` in every process of `layout`. The other methods use it from now on."""
        target = self._target = benchmark.BenchmarkTarget(
            msgspec.structs.replace(backend, call_tokens=0), layout.threads
        )
        while len(self._executors) < layout.processes:
            # The forkserver, which forks them, ends with this process.
            executor = ProcessPoolExecutor(1, self._context, initializer=die_with_parent)
            self._executors.append(executor)
        missing = [
            number for number in range(layout.processes) if (number, target) not in self._opened
        ]
        begun = [
            self._executors[number].submit(
                benchmark.open_model,
                self._entry,
                self._folder,
                target,
                self._device_of(number),
                self.keeps_several,
            )
            for number in missing
        ]
        if not self.keeps_several:
            self._opened = {
                (number, other) for number, other in self._opened if number not in missing
            }
        self._gather(begun, OPEN_LIMIT_S)
        self._opened |= {(number, target) for number in missing}

    def _device_of(self, number: int) -> str:
        """The device of a process. Spread over GPUs as in ModelPool."""
        gpus = len(self._machine.gpus)
        is_spread = self._device in ("auto", "cuda") and gpus
        return f"cuda:{number % gpus}" if is_spread else self._device

    def vectors(self, texts: Sequence[PreparedText], together: int) -> np.ndarray:
        """Calls benchmark.vectors in the first process."""
        return self._ask_first(benchmark.vectors, self._target, texts, together)

    def call_tokens(self, text: PreparedText, longest: int) -> int:
        """Calls benchmark.call_tokens in the first process."""
        return self._ask_first(benchmark.call_tokens, self._target, text, longest)

    def reading(
        self, texts: Sequence[PreparedText], call_cost: int, layout: Layout, seconds: float
    ) -> Timing:
        """The rate of all processes of `layout` together."""
        begun = [
            executor.submit(benchmark.throughput, self._target, texts, call_cost, seconds)
            for executor in self._executors[: layout.processes]
        ]
        return self._read(self._gather(begun, CALL_LIMIT_S), layout)

    def _read(self, throughputs: Sequence[benchmark.Throughput], layout: Layout) -> Timing:
        by_wall = sum(throughput.texts / throughput.wall_s for throughput in throughputs)
        if self._is_gpu:
            return Timing(by_wall)
        cores = self._machine.cores
        cpu_s = sum(throughput.cpu_s for throughput in throughputs)
        rate, wanted_cores = by_wall, layout.processes * layout.threads
        if layout.threads == 1 or layout.processes >= cores:
            # They keep the cores busy, so their CPU seconds show the rate on an otherwise idle
            # machine.
            rate = sum(throughput.texts / throughput.cpu_s for throughput in throughputs) * min(
                1.0, cores / layout.processes
            )
        elif self._target.backend.backend == "onnx":
            wanted_cores = layout.processes  # its other threads sleep if they have no work
        wanted_s = max(throughput.wall_s for throughput in throughputs) * min(cores, wanted_cores)
        return Timing(
            rate,
            cpu_s / sum(throughput.tokens for throughput in throughputs),
            max(0.0, 1 - cpu_s / wanted_s),
        )

    def _ask_first(
        self, ask: Callable[Given, Answer], *args: Given.args, **named: Given.kwargs
    ) -> Answer:
        return self._gather([self._executors[0].submit(ask, *args, **named)], CALL_LIMIT_S)[0]

    def _gather(self, begun: Sequence[Future[Answer]], limit_s: float) -> list[Answer]:
        try:
            return [future.result(limit_s) for future in begun]
        except TimeoutError as error:
            self._end()
            raise ModelFailed(f"took longer than {limit_s:g} s") from error
        except BrokenProcessPool as error:
            self._end()
            raise ModelFailed("its process died") from error
        except PenstockError:
            raise
        except Exception as error:
            # The boundary to the model libraries: their errors rule out only this candidate.
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
