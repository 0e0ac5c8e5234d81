"""Chooses the next model for a process when several models share the process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SWITCH_SHARE = 0.06
"""Maximum share of the processes' time to spend on switches.

This keeps the total below a tenth, including other costs of switching, such as cold caches.
"""
URGENT_SHARE = 0.5
MIN_WAIT_S = 2.0
"""Minimum wait, for models that load quickly.

A model's batches are fuller when it runs several in a row than when models take turns.
"""
LOAD_GUESS_S = 1.0
"""Estimate for a model that has not been loaded yet."""
BATCH_FADE = 0.8
"""Each batch shrinks a longer remembered duration by this factor."""


class QueueState(Protocol):
    """The properties of one model's queue that the scheduler needs to know."""

    @property
    def waiting(self) -> int:
        """Number of waiting items."""

    @property
    def oldest_s(self) -> float:
        """When the oldest waiting item was queued, in Unix seconds.

        Read only if items are waiting.
        """

    def earliest_deadline_s(self, after_s: float) -> float:
        """Returns the earliest deadline at or after `after_s`, in Unix seconds.

        Infinite if there are no deadlines.
        """


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing should run before `until_s` (Unix seconds, or None) unless an item is queued."""

    until_s: float | None


class ModelScheduler:
    """Schedules `models` queues on `processes` model processes.

    Uses no clock and does no I/O. Times are Unix seconds from the same clock.

    Loading a model takes time, so a process keeps running its loaded (resident) models. It switches
    to another model in three cases. `switch_wait_s` is the sum of all load times, divided by
    SWITCH_SHARE and the number of processes, so switches in the first case take at most that share
    of the time:

    1. Due: the model's oldest job has waited for `switch_wait_s`, and the model has not been served
       for that long.
    2. Urgent: a job's deadline would otherwise pass but can still be met. This makes a model due
       early, but at most once per wait at URGENT_SHARE. Otherwise, urgent callers could keep a
       worker doing nothing but switching.
    3. Worthwhile: no resident model has jobs, and the other jobs' total waiting time since then has
       reached the load time. From then on, waiting costs more than the switch.

    The bound: due models run first, in the order in which they became due, whether or not they are
    resident. A model that has just been served becomes due again only after a wait, so it queues
    behind all models that are due now. Therefore, once a model is due, every other model runs at
    most one batch before it. With n models, the first batch with a model's oldest job starts no
    later than the following, counted from when that job was queued: `switch_wait_s`, the batch
    running at that time, n - 1 loads and batches of other models, and the model's own load.
    """

    def __init__(self, models: int, processes: int) -> None:
        self._processes = processes
        self._served_s = [float("-inf")] * models
        self._load_s = [LOAD_GUESS_S] * models
        self._batch_s = 0.0

    @property
    def switch_wait_s(self) -> float:
        """The maximum time, in seconds, that a job waits before its model is due."""
        return max(MIN_WAIT_S, self._wait_s(SWITCH_SHARE))

    def choose(
        self,
        resident: Collection[int],
        free_since_s: float,
        queues: Sequence[QueueState],
        now_s: float,
    ) -> int | Idle:
        """Returns the model for a free process to run now, or how long the process stays idle.

        Args:
            free_since_s: when the process finished its last batch.
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
        if loaded := [model for model in waiting if model in resident]:
            return min(loaded, key=self._served_s.__getitem__)
        worth_s = {model: self._worth_s(model, queues[model], free_since_s) for model in waiting}
        best = min(waiting, key=worth_s.__getitem__)
        return best if worth_s[best] <= now_s else Idle(min(worth_s[best], due_s[first]))

    def _due_s(self, model: int, queue: QueueState, now_s: float) -> float:
        usual_s = max(queue.oldest_s, self._served_s[model]) + self.switch_wait_s
        deadline_s = queue.earliest_deadline_s(now_s + self._load_s[model])
        # Time for the batch that is running at that point, plus the job's own batch.
        urgent_s = deadline_s - self._load_s[model] - 2 * self._batch_s
        allowed_s = self._served_s[model] + max(MIN_WAIT_S, self._wait_s(URGENT_SHARE))
        return min(usual_s, max(urgent_s, allowed_s))

    def _worth_s(self, model: int, queue: QueueState, free_since_s: float) -> float:
        """Returns the time from which loading the model into an idle process is worthwhile."""
        return max(queue.oldest_s, free_since_s) + self._load_s[model] / queue.waiting

    def _wait_s(self, share: float) -> float:
        """Returns the wait between a model's batches at which loads take up `share` of the time."""
        return sum(self._load_s) / (share * self._processes)

    def batch_started(self, model: int, now_s: float) -> None:
        """Records that a process has started a batch of `model`."""
        self._served_s[model] = now_s

    def batch_finished(self, batch_s: float) -> None:
        self._batch_s = max(batch_s, BATCH_FADE * self._batch_s)

    def update_load_times(self, load_s: Mapping[int, float]) -> None:
        """Sets how long each of these models' last load took."""
        for model, seconds in load_s.items():
            self._load_s[model] = seconds
