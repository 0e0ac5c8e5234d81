"""Measures a doubtful choice of a backend again once its worker is idle, in the worker's I/O process.

A choice is doubtful if it rests on no measurement (Choice.is_provisional) or if real batches contradict it. The result
is kept for the next start. This worker goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from shared.errors import PenstockError
from workers.autotune.choice import Choice

IDLE_S = 60.0
FAR = 1.6
"""A choice is contradicted by batches that cost so many times the CPU time it was made for, or that part of it."""
WINDOW_CPU_S = 20.0
WINDOWS = 3
"""So many in a row: a neighbor on the machine can slow memory for a while."""
FEWEST_TOKENS = 256
"""What smaller batches cost is calls rather than tokens."""

log = logging.getLogger(__name__)


class BatchCost(Protocol):
    """What is seen of a batch that a model process ran."""

    @property
    def padded_work(self) -> int:
        """Tokens computed."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process."""


class CostMonitor:
    """Whether batches cost, for long, far more or less CPU time per token than `expected_s`; 0: nothing is expected."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._tokens = 0
        self._cpu_s = 0.0
        self._far_windows = 0

    def ran(self, batch: BatchCost) -> None:
        """Counts one batch."""
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
        """Whether all of the last windows were far off."""
        return self._far_windows >= WINDOWS


@dataclass
class TunedModel:
    """A model's choice as it runs here; `doubt` has it kept as provisional, `measure` measures and keeps it anew."""

    model: str
    choice: Choice
    doubt: Callable[[], Awaitable[None]]
    measure: Callable[[], Awaitable[Choice]]


class Renewal:
    """Watches the batches of a worker's models, and has what is in doubt measured; a context manager.

    Args:
        held: by the number of the model in the worker; None where nothing was chosen, as for images.
        idle_s: no batch may have run for so long.
        clock: seconds.
    """

    def __init__(
        self, held: Sequence[TunedModel | None], *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._held = held
        self._watches = [CostMonitor(one.choice.cpu_s_per_token if one else 0.0) for one in held]
        self._idle_s = idle_s
        self._clock = clock
        self._last_s = clock()
        self._worked = asyncio.Event()
        self._doubtful: list[TunedModel] = [one for one in held if one and one.choice.is_provisional]
        self._has_doubt = asyncio.Event()
        if self._doubtful:
            self._has_doubt.set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ran(self, number: int, batch: BatchCost) -> None:
        """A model process ran a batch of model `number`."""
        self._last_s = self._clock()
        self._worked.set()
        held, watch = self._held[number], self._watches[number]
        if held is None or held in self._doubtful:
            return
        watch.ran(batch)
        if watch.is_contradicted:
            log.warning("batches contradict the choice of a backend", extra={"model": held.model})
            self._doubtful.append(held)
            self._has_doubt.set()

    async def _run(self) -> None:
        while True:
            await self._has_doubt.wait()
            held = self._doubtful[0]
            try:
                if not held.choice.is_provisional:
                    held.choice.is_provisional = True
                    await held.doubt()  # kept, should this worker end before it is idle
                await self._idle()
                choice = await self._measured(held)
            except (PenstockError, OSError) as error:  # no such backend any more, no process, no room on the disk
                log.warning("backend not measured again", extra={"model": held.model, "reason": str(error)})
            else:
                if choice is None:
                    continue  # work came, which goes first
                _tell(held, choice)
            # Once in the life of a worker: a machine that is never quiet would be measured all day.
            self._doubtful.remove(held)
            self._watches[self._held.index(held)] = CostMonitor(0.0)
            if not self._doubtful:
                self._has_doubt.clear()

    async def _idle(self) -> None:
        """Returns once no batch has run for the idle time."""
        while True:
            self._worked.clear()
            left_s = self._last_s + self._idle_s - self._clock()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _measured(self, held: TunedModel) -> Choice | None:
        """What is measured now; None where a batch ran meanwhile, which ends it."""
        measuring = asyncio.ensure_future(held.measure())
        working = asyncio.create_task(self._worked.wait())
        try:
            await asyncio.wait({measuring, working}, return_when=asyncio.FIRST_COMPLETED)
            return measuring.result() if measuring.done() else None
        finally:
            for task in (measuring, working):
                task.cancel()
            await asyncio.gather(measuring, working, return_exceptions=True)


def _tell(held: TunedModel, choice: Choice) -> None:
    facts = {"model": held.model, "backend": choice.backend.name, "layout": choice.layout.name, "reason": choice.reason}
    log.info("backend chosen for the next start", extra={**facts, "is_provisional": choice.is_provisional})
