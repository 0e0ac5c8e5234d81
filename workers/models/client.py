"""The interface to a compute process, used by the pool (workers/runtime/pool.py).

One of our model processes runs all of a worker's models that share its libraries
(workers/runtime/client.py). Any other process, such as a custom class's
(workers/models/custom/client.py), has one model and its own client.
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
"""Called with the results of items from a model that computes in steps."""


@dataclass(frozen=True, eq=False, slots=True)
class RunningBatch:
    """A batch running in a process.

    `done` raises ModelProcessDied if the process died, or was killed because the batch took too
    long or the response was invalid. If the batch has steps, `cancel` stops it after the current
    step, and items without a result fail as canceled. `watch` requests previews of these slots for
    a moment. Both do nothing once the batch has finished.
    """

    done: asyncio.Future[BatchResult]
    cancel: Callable[[], None]
    watch: Callable[[Sequence[int]], None]


class ProcessClient(Protocol):
    """A process that is ready. Its models are numbered from 0.

    It runs one batch at a time, or two if the model is in `facts.overlapping`.
    """

    facts: Ready
    """Information reported at startup."""
    residency: ResidencyReport
    """The models loaded in the process. Replaced with a new object after each change."""

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process and everything it started, as last reported."""

    @property
    def pid(self) -> int:
        """The process ID, or 0 if the process is not running right now."""

    async def send(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_step: OnProgress | None,
        model: int = 0,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        """Sends one batch for model number `model` as soon as the process can accept it.

        `timeout_s` starts counting when the batch becomes the oldest one in the process, and
        excludes the time spent setting up the model.

        Raises:
            ModelProcessDied: the process died before accepting the batch.
        """

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        """Runs items on model number `model`, which computes in steps, until none are left.

        More items may be admitted.

        Args:
            timeout_s: maximum time without a sign of life.
            on_message: called with each message except the last.

        Raises:
            ModelProcessDied: the process died, or was killed because it did not respond.
        """

    def admit(self, items: Sequence[Prepared]) -> int | None:
        """Adds items to the batch that runs in steps. Returns the first item's slot.

        None if no batch is running. If the batch has just ended, as its final message reports,
        these items get no separate outcome.
        """

    def drop(self, slots: Sequence[int]) -> None:
        """Stops these items in the batch that runs in steps. They fail as canceled."""

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts these items in the batch that runs in steps. They come back as preempted."""

    def watch(self, slots: Sequence[int]) -> None:
        """Requests previews of these slots in the batch that runs in steps, for a moment."""

    async def evict(self, models: Sequence[int], on_turn: Callable[[], None]) -> None:
        """Frees these models' memory between two batches.

        The models are loaded again when they are next used.

        Args:
            on_turn: called once no batch is running, before this replaces the process's report.
        """

    async def serve(self, on_end: Callable[[], None]) -> str:
        """Runs until the process has exited for good. Returns the reason, for operators.

        `on_end` is called before the current batch fails. A process that sets itself up again does
        not count as having exited. Canceling this call stops the process.
        """


MakeRoom = Callable[[], Awaitable[bool]]
"""Evicts other processes' models from the same device. Returns whether there were any to evict."""
StartClient = Callable[[MakeRoom], Awaitable[ProcessClient]]
"""Starts a process and waits until it is ready.

Raises PenstockError if the process refused to start (usually ConfigurationError), died, or was not
ready in time (ModelFailed, with the last part of its output).
"""


@dataclass(frozen=True)
class Launch:
    """One of the pool's processes: how to start it, and the models it computes.

    `models`: their numbers in the pool, ordered by their numbers in the process.
    """

    start: StartClient
    models: Sequence[int] = (0,)


class ModelProcessDied(ModelFailed):
    """The process died, hung, or sent an invalid message while running the batch."""


def has_lost_gpu(reason: str) -> bool:
    return f"(status {GPU_LOST_STATUS})" in reason
