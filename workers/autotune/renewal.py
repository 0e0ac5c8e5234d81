"""Measures a doubtful choice of a backend again when its worker is idle.

A choice is doubtful if it has no measurement (Choice.is_provisional) or if real batches contradict
it. The result is saved for the next start. This worker keeps its current choice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from shared.concurrency import BackgroundTask
from shared.errors import PenstockError
from workers.autotune.choice import Choice

IDLE_S = 60.0
FAR = 1.6
"""Batches contradict a choice if their CPU time differs from the measured one by this factor."""
WINDOW_CPU_S = 20.0
WINDOWS = 3
"""The number of windows needed in a row, because other programs can slow down memory for a
while."""
FEWEST_TOKENS = 256
"""Smaller batches are ignored, because calls dominate their cost."""

log = logging.getLogger(__name__)


class BatchCost(Protocol):
    """The cost of a batch that a model process ran."""

    @property
    def padded_work(self) -> int:
        """Tokens computed, including padding."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process."""


class CostMonitor:
    """Detects batches whose CPU time per token differs from `expected_s` (0: unknown) for long."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._tokens = 0
        self._cpu_s = 0.0
        self._far_windows = 0

    def ran(self, batch: BatchCost) -> None:
        """Adds one batch."""
        if not self._expected_s or batch.padded_work < FEWEST_TOKENS:
            return
        self._tokens += batch.padded_work
        self._cpu_s += batch.cpu_s
        if self._cpu_s < WINDOW_CPU_S:
            return
        ratio = self._cpu_s / self._tokens / self._expected_s
        self._far_windows = 0 if 1 / FAR < ratio < FAR else self._far_windows + 1
        self._tokens, self._cpu_s = 0, 0.0

    @property
    def is_contradicted(self) -> bool:
        """True if all of the last windows differed."""
        return self._far_windows >= WINDOWS


@dataclass
class TunedModel:
    """A model with its choice.

    `mark_provisional` saves it as provisional. `measure` makes and saves a new one.
    """

    model: str
    choice: Choice
    mark_provisional: Callable[[], Awaitable[None]]
    measure: Callable[[], Awaitable[Choice]]


class Renewal:
    """Watches the batches of a worker's models, and measures doubtful choices again.

    A context manager.

    Args:
        tuned: by the number of the model in the worker. None if there is no choice, as for images.
        idle_s: how long the worker must be idle.
        clock: seconds.
    """

    def __init__(
        self,
        tuned: Sequence[TunedModel | None],
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tuned = tuned
        self._monitors = [CostMonitor(one.choice.cpu_s_per_token if one else 0.0) for one in tuned]
        self._idle_s = idle_s
        self._clock = clock
        self._last_s = clock()
        self._worked = asyncio.Event()
        self._doubtful: list[TunedModel] = [
            one for one in tuned if one and one.choice.is_provisional
        ]
        self._has_doubt = asyncio.Event()
        if self._doubtful:
            self._has_doubt.set()
        self._renewing = BackgroundTask("measuring backends again", self._run)

    async def __aenter__(self) -> Self:
        self._renewing.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._renewing.stop()

    def ran(self, number: int, batch: BatchCost) -> None:
        """Records a batch of model `number`."""
        self._last_s = self._clock()
        self._worked.set()
        tuned, monitor = self._tuned[number], self._monitors[number]
        if tuned is None or tuned in self._doubtful:
            return
        monitor.ran(batch)
        if monitor.is_contradicted:
            log.warning("batches contradict the choice of a backend", extra={"model": tuned.model})
            self._doubtful.append(tuned)
            self._has_doubt.set()

    async def _run(self) -> None:
        while True:
            await self._has_doubt.wait()
            tuned = self._doubtful[0]
            try:
                if not tuned.choice.is_provisional:
                    tuned.choice.is_provisional = True
                    await (
                        tuned.mark_provisional()
                    )  # saved in case this worker ends before it is idle
                await self._idle()
                choice = await self._measured(tuned)
            except (
                PenstockError,
                OSError,
            ) as error:  # the backend is gone, the process failed, or the disk is full
                log.warning(
                    "backend not measured again", extra={"model": tuned.model, "reason": str(error)}
                )
            else:
                if choice is None:
                    continue  # a batch ran, and has priority
                _log_choice(tuned, choice)
            # At most once per worker. Otherwise a busy machine would be measured all day.
            self._doubtful.remove(tuned)
            self._monitors[self._tuned.index(tuned)] = CostMonitor(0.0)
            if not self._doubtful:
                self._has_doubt.clear()

    async def _idle(self) -> None:
        """Waits until no batch has run for the idle time."""
        while True:
            self._worked.clear()
            left_s = self._last_s + self._idle_s - self._clock()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _measured(self, tuned: TunedModel) -> Choice | None:
        """Measures. Returns None if a batch ran in the meantime, which cancels it."""
        measuring = asyncio.ensure_future(tuned.measure())
        working = asyncio.create_task(self._worked.wait())
        try:
            await asyncio.wait({measuring, working}, return_when=asyncio.FIRST_COMPLETED)
            return measuring.result() if measuring.done() else None
        finally:
            for task in (measuring, working):
                task.cancel()
            await asyncio.gather(measuring, working, return_exceptions=True)


def _log_choice(tuned: TunedModel, choice: Choice) -> None:
    facts = {
        "model": tuned.model,
        "backend": choice.backend.name,
        "layout": choice.layout.name,
        "reason": choice.reason,
    }
    log.info(
        "backend chosen for the next start",
        extra={**facts, "is_provisional": choice.is_provisional},
    )
