"""Whose batch a model process runs next, where one worker serves several models. Pure: no clock, no I/O.

To bring a model in costs its load seconds, so a process keeps to the models it holds (they are resident) and leaves
them for another in three cases only. `switch_wait_s` is the sum of all load seconds over SWITCH_SHARE of the worker's
process seconds, so that switching for the first reason takes at most that share of the time:

1. Due: the model's oldest job has waited for `switch_wait_s`, and the model was not served for as long.
2. Due earlier: a job's deadline would pass otherwise and can still be met. A model has this right once in the wait that
   URGENT_SHARE gives, or callers in a hurry could make a worker do nothing but switch.
3. Nothing that is resident waits, and the time that others have waited since then, all jobs added up, has reached the
   load seconds: whoever goes on paying that rent pays more than the switch costs.

The bound. The due run first, in the order in which they became due, resident or not. Once served, a model is due again
only after a wait, so behind everybody who is due now: once a model is due, every other one runs at most one batch
before it. Of n models, the first batch with a model's oldest job therefore starts, from when that job was queued, after
at most `switch_wait_s`, the batch that runs then, n - 1 loads and batches of the others, and its own load.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SWITCH_SHARE = 0.06
"""Of the time of all model processes; leaves room below a tenth for what else a switch costs, such as cold caches."""
URGENT_SHARE = 0.5
SHORTEST_WAIT_S = 2.0
"""A floor for models that load in no time: batches of one model in a row are fuller than batches in turn."""
LOAD_GUESS_S = 1.0
"""Of a model that was not brought in yet."""
BATCH_FADE = 0.8
"""What is left of the memory of a long batch with every one after it."""


class Queue(Protocol):
    """What is seen of one model's queue."""

    @property
    def waiting(self) -> int:
        """How many entries wait."""

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was queued, unix seconds; asked only where some wait."""

    def earliest_deadline_s(self, after_s: float) -> float:
        """The earliest deadline that is not before `after_s`, unix seconds; infinite where there is none."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is to be run before `until_s` (unix seconds; None: without end), unless something is queued meanwhile."""

    until_s: float | None


class ModelScheduler:
    """The turns of `models` queues on `processes` model processes; times are unix seconds of one clock."""

    def __init__(self, models: int, processes: int) -> None:
        self._processes = processes
        self._served_s = [float("-inf")] * models
        self._load_s = [LOAD_GUESS_S] * models
        self._batch_s = 0.0

    @property
    def switch_wait_s(self) -> float:
        """How long a job waits at most before its model is due."""
        return max(SHORTEST_WAIT_S, self._wait_s(SWITCH_SHARE))

    def choose(
        self, resident: Collection[int], free_since_s: float, queues: Sequence[Queue], now_s: float
    ) -> int | Idle:
        """The model whose batch a free process runs now, or how long it rests.

        Args:
            resident: the models that the process holds.
            free_since_s: when the process ended its last batch.
            queues: one for each model.
            now_s: the time.
        """
        waiting = [model for model, queue in enumerate(queues) if queue.waiting]
        if len(waiting) == 1 and waiting[0] in resident:
            return waiting[0]
        due_s = {model: self._due_s(model, queues[model], now_s) for model in waiting}
        first = min(waiting, key=due_s.__getitem__, default=None)
        if first is None:
            return Idle(None)
        if due_s[first] <= now_s:
            return first
        if here := [model for model in waiting if model in resident]:
            return min(here, key=self._served_s.__getitem__)
        worth_s = {model: self._worth_s(model, queues[model], free_since_s) for model in waiting}
        best = min(waiting, key=worth_s.__getitem__)
        return best if worth_s[best] <= now_s else Idle(min(worth_s[best], due_s[first]))

    def _due_s(self, model: int, queue: Queue, now_s: float) -> float:
        """From when on the model goes before all that are not due."""
        usual_s = max(queue.oldest_s, self._served_s[model]) + self.switch_wait_s
        deadline_s = queue.earliest_deadline_s(now_s + self._load_s[model])
        # A batch may be running when the time comes, and the job's own has to be done by the deadline.
        urgent_s = deadline_s - self._load_s[model] - 2 * self._batch_s
        allowed_s = self._served_s[model] + max(SHORTEST_WAIT_S, self._wait_s(URGENT_SHARE))
        return min(usual_s, max(urgent_s, allowed_s))

    def _worth_s(self, model: int, queue: Queue, free_since_s: float) -> float:
        """From when on an idle process brings the model in."""
        return max(queue.oldest_s, free_since_s) + self._load_s[model] / queue.waiting

    def _wait_s(self, share: float) -> float:
        """The wait between two services of a model with which all of them together load in this share of the time."""
        return sum(self._load_s) / (share * self._processes)

    def batch_started(self, model: int, now_s: float) -> None:
        """A process takes a batch of `model`."""
        self._served_s[model] = now_s

    def batch_finished(self, batch_s: float) -> None:
        """A batch was run in so many seconds."""
        self._batch_s = max(batch_s, BATCH_FADE * self._batch_s)

    def update_load_times(self, load_s: Mapping[int, float]) -> None:
        """What bringing in each of these models took the last time, in seconds."""
        for model, seconds in load_s.items():
            self._load_s[model] = seconds
