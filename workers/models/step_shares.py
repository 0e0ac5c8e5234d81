"""Divides the time that a model's steps take among the items they compute."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.messages import PrintedLogs
from shared.models.catalog import Model
from shared.models.service_rate import StepTime
from shared.models.tasks import Result
from workers.models.reports import BatchResult, check_result

SHARED_WEIGHTS_SHARE = 0.5
"""Initial guess for a model that reads all of its weights once per step: a step that generates a
token for every slot takes twice the fixed time. With SmolLM2-135M, 16 texts take 1.8 to 4.1 times
as long as one text (docs/reference/generation.md).
"""


class StepRoom:
    """A model's room in a process, and how much of it the steps have left unused so far."""

    def __init__(self, model: Model) -> None:
        self._max_items = model.batch.max_items
        self._budget = model.budget
        share = SHARED_WEIGHTS_SHARE if model.definition.shares_weights else 0.0
        self._time = StepTime(share, full_work=self._max_items)

    def spare_s(self, rooms: Sequence[int], work: int, seconds: float) -> float:
        """Records a step.

        Returns the seconds in which other items could have been computed at no extra cost.

        Args:
            rooms: the part of the budget taken up by each item in the step.
            work: work computed by the step. If 0, the work is unknown, so each item counts as one.
        """
        fill = min(1.0, max(len(rooms) / self._max_items, sum(rooms) / self._budget))
        work = work or max(1, len(rooms))
        self._time.observe(work, seconds)
        return self._time.spare_s(fill, work, seconds)


@dataclass(slots=True)
class _Item:
    """An item in the model, and its share of the step time so far."""

    started_at_s: float
    room: int
    """The part of the budget that this item takes up."""
    steps: int = 0
    item_steps: int = 0
    """Number of items per step, summed over all of this item's steps."""
    share_s: float = 0.0
    spare_s: float = 0.0


class StepShares:
    """The items in one batch, and each one's share of the step times."""

    def __init__(self, room: StepRoom, number: int = 0) -> None:
        self._room = room
        self._number = number
        self._items: dict[int, _Item] = {}
        self._spare_s = 0.0

    def add(self, slot: int, room: int) -> None:
        """Adds an item that takes up this part of the budget."""
        self._items[slot] = _Item(time.time(), room)

    def remove(self, slot: int) -> None:
        """Forgets an item that has to wait, if it is still in the batch."""
        self._items.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._items

    @property
    def slots(self) -> list[int]:
        return list(self._items)

    def charge(self, step_s: float, work: int = 0, waiting: Collection[int] = ()) -> None:
        """Charges each computed item its share of a step.

        Args:
            step_s: duration of the step, in seconds.
            work: work the step computed, in tokens or pixels. 0 if unknown.
            waiting: slots of items that the step did not compute.
        """
        computed = [item for slot, item in self._items.items() if slot not in waiting]
        if not (count := len(computed)):
            return
        spare_s = self._room.spare_s([item.room for item in computed], work, step_s)
        self._spare_s += spare_s
        for item in computed:
            item.steps += 1
            item.item_steps += count
            item.share_s += step_s / count
            item.spare_s += spare_s / count

    def take_spare_s(self) -> float:
        """Returns the spare seconds since the last call."""
        spare_s, self._spare_s = self._spare_s, 0.0
        return spare_s

    def end(
        self,
        slot: int,
        result: Result | Exception,
        *,
        memory_bytes: int,
        loaded_at_s: float,
        steps_saved: int | None = None,
        logs: PrintedLogs | None = None,
    ) -> BatchResult:
        """Removes an item, and returns its resource use and outcome.

        Args:
            slot: slot of the item. An item that was never admitted took up no time.
            memory_bytes: resident memory of the process.
            loaded_at_s: when the process loaded the model, in Unix seconds.
            steps_saved: steps skipped because the item was canceled.
            logs: output that the model printed for it.
        """
        item = self._items.pop(slot, None) or _Item(time.time(), 0)
        batch_items = max(1, round(item.item_steps / item.steps)) if item.steps else 1
        work = int(getattr(result, "tokens", 0)) or int(getattr(result, "pixel_steps", 0))
        work = work or int(getattr(result, "work", 0))
        return BatchResult(
            number=self._number,
            results=[check_result(result)],
            started_at_s=item.started_at_s,
            finished_at_s=time.time(),
            # Divided by the number of items in the batch, as everywhere else, this is the item's
            # share of the time.
            inference_ms=item.share_s * batch_items * 1000,
            spare_s=item.spare_s,
            real_work=work,
            padded_work=work,
            memory_bytes=memory_bytes,
            loaded_at_s=loaded_at_s,
            average_items=batch_items,
            steps_saved=steps_saved,
            logs={0: logs} if logs is not None and logs.end else {},
        )
