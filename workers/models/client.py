"""The interface of a process that computes items, as the pool drives it (workers/runtime/pool.py).

One of our model processes has all models of a worker that share its libraries
(workers/runtime/client.py). Any other process, such as the process of a custom class
(workers/models/custom/client.py), has one model and a separate client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import ModelFailed
from workers.models.base import GPU_LOST_STATUS, Prepared
from workers.models.reports import (
    BatchResult,
    Previews,
    Ready,
    ResidencyReport,
    StepMessage,
    StepsEnded,
)

OnProgress = Callable[[int, int], None]
"""Called as on_step(step, steps) after some steps of a batch."""
OnPreviews = Callable[[Previews], None]
OnStepMessage = Callable[[StepMessage], None]
"""Called with item results from a model that computes in steps."""


@dataclass(frozen=True, eq=False, slots=True)
class RunningBatch:
    """A batch that a process has.

    `done` raises ModelProcessDied if the process died, or was killed because the batch took too
    long or its answer was invalid. `cancel` stops the batch after its current step if it has steps:
    items without a result fail as canceled. `watch` requests previews of these slots for a moment.
    Both do nothing once the batch has ended.
    """

    done: asyncio.Future[BatchResult]
    cancel: Callable[[], None]
    watch: Callable[[Sequence[int]], None]


class ProcessClient(Protocol):
    """A process that is ready. Its models have numbers from 0 on.

    It has one batch at a time, or two of a model in `facts.overlapping`.
    """

    facts: Ready
    """Facts about its start."""
    residency: ResidencyReport
    """The models that it holds. A new object after each change."""

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process and all that it started, as last reported."""

    @property
    def pid(self) -> int:
        """Its process id. 0: it is not running now."""

    async def send(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_step: OnProgress | None,
        model: int = 0,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        """Sends one batch for model number `model` as soon as the process can take it.

        `timeout_s` counts from when the batch is the oldest one in the process, without the time in
        which the model is set up.

        Raises:
            ModelProcessDied: the process died before it took the batch.
        """

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        """Runs items on model number `model`, which computes in steps, until none is left.

        More may be admitted.

        Args:
            timeout_s: the longest time without a sign of life.
            on_message: called with each message but the last one.

        Raises:
            ModelProcessDied: the process died, or was killed because it did not respond.
        """

    def admit(self, items: Sequence[Prepared]) -> int | None:
        """Adds items to the batch that runs in steps. Returns the slot of the first.

        None: no batch runs. The batch may have ended by now, which its end reports: then the items
        do not have a separate end.
        """

    def drop(self, slots: Sequence[int]) -> None:
        """Stops these items of the batch that runs in steps. They fail as canceled."""

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts these items of the batch that runs in steps. They come back as preempted."""

    def watch(self, slots: Sequence[int]) -> None:
        """Requests previews of these slots in the batch that runs in steps, for a moment."""

    async def evict(self, models: Sequence[int]) -> None:
        """Frees the memory of these models, between two batches. They are loaded when used."""

    async def serve(self, on_end: Callable[[], None]) -> str:
        """Serves until the process has ended for good. Returns the reason, for operators.

        `on_end` is called before the current batch fails. A process that sets itself up again does
        not end. Canceled, it ends the process.
        """


MakeRoom = Callable[[], Awaitable[bool]]
"""Evicts what other processes hold on the same device. Returns whether that was anything."""
StartClient = Callable[[MakeRoom], Awaitable[ProcessClient]]
"""Starts a process and waits until it is ready.

Raises PenstockError: it refused (usually ConfigurationError), died, or was not ready in time
(ModelFailed, with the end of its output).
"""


@dataclass(frozen=True)
class Launch:
    """A process of a pool: how it is started, and the models that it computes.

    `models`: their numbers in the pool, in the order of their numbers in the process.
    """

    start: StartClient
    models: Sequence[int] = (0,)


class ModelProcessDied(ModelFailed):
    """The process died, hung or sent an invalid message while it had the batch."""


def has_lost_gpu(reason: str) -> bool:
    return f"(status {GPU_LOST_STATUS})" in reason
