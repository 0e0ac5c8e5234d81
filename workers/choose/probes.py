"""The probe processes of a choice: as many as the widest layout needs, asked all together or one alone."""

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

from shared.catalogue import Model as Entry
from shared.errors import ModelFailed, PenstockError
from workers.choose import probe
from workers.choose.choice import Layout
from workers.models.backend import Backend
from workers.models.base import PreparedText

OPEN_LIMIT_S = 60.0
"""Importing torch and loading the weights, on a busy machine."""
CALL_LIMIT_S = 60.0

Given = ParamSpec("Given")
Told = TypeVar("Told")


class Probes:
    """Probe processes on one model; a context manager. A process that dies or hangs is replaced at the next `open`.

    Raises (every method): ModelFailed where a process died or took too long, and what the model itself raises.
    """

    def __init__(self, entry: Entry, folder: Path, device: str, gpus: int = 0) -> None:
        self._entry = entry
        self._folder = folder
        self._device = device
        self._gpus = gpus
        self._executors: list[ProcessPoolExecutor] = []
        self._opened: tuple[Backend, Layout] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        # Processes first: to shut down waits for a call that hangs.
        for process in multiprocessing.active_children():
            process.kill()
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)
        self._executors = []
        self._opened = None

    def open(self, backend: Backend, layout: Layout) -> None:
        """Loads `backend` in every process of `layout`, unless that is what they have."""
        wanted = (msgspec.structs.replace(backend, call_tokens=0), layout)
        if wanted == self._opened:
            return
        self._opened = None
        while len(self._executors) < layout.processes:
            context = multiprocessing.get_context("spawn")
            self._executors.append(ProcessPoolExecutor(max_workers=1, mp_context=context))
        begun = [
            executor.submit(probe.open_model, self._entry, self._folder, backend, self._place(number), layout.threads)
            for number, executor in enumerate(self._executors[: layout.processes])
        ]
        self._gather(begun, OPEN_LIMIT_S)
        self._opened = wanted

    def _place(self, number: int) -> str:
        """The device of a process: as the pool of model processes spreads them over GPUs."""
        is_spread = self._device in ("auto", "cuda") and self._gpus
        return f"cuda:{number % self._gpus}" if is_spread else self._device

    def vectors(self, texts: Sequence[PreparedText], together: int) -> np.ndarray:
        """What the first process computes; as probe.vectors."""
        return self._ask_first(probe.vectors, texts, together)

    def call_tokens(self, text: PreparedText, longest: int) -> int:
        """What the first process finds; as probe.call_tokens."""
        return self._ask_first(probe.call_tokens, text, longest)

    def texts_per_s(self, texts: Sequence[PreparedText], call_cost: int, layout: Layout, seconds: float) -> float:
        """The rate of all processes of `layout` together."""
        begun = [
            executor.submit(probe.texts_per_s, texts, call_cost, seconds)
            for executor in self._executors[: layout.processes]
        ]
        return sum(self._gather(begun, CALL_LIMIT_S))

    def _ask_first(self, ask: Callable[Given, Told], *given: Given.args, **named: Given.kwargs) -> Told:
        return self._gather([self._executors[0].submit(ask, *given, **named)], CALL_LIMIT_S)[0]

    def _gather(self, begun: Sequence[Future[Told]], limit_s: float) -> list[Told]:
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
            # The boundary to the model libraries: whatever they raise speaks against this candidate, no more.
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
