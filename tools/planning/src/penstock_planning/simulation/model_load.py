"""The requests for a model in a scenario, and what its workers take for them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock_planning.entry import Entry
from penstock_planning.item_load import ItemLoad
from penstock_planning.simulation.streams import Arrivals, Seconds


class StepsLoad(Entry):
    """Step times of a worker with continuous batching."""

    count: float = Field(gt=0)
    """Steps of an item, on average."""
    spread: Literal["none", "exponential"] = "exponential"
    """The distribution of the number of steps."""
    fixed_s: Seconds
    """Seconds of a step that do not depend on its items."""
    per_item_s: Seconds
    """More for each item that is in."""
    first_s: Seconds = 0.0
    """An item's first step, in which the others wait: a prompt is read."""

    def step_s(self, items: int) -> float:
        """Seconds of a step of a worker that is alone on its GPU."""
        return self.fixed_s + self.per_item_s * items

    @property
    def first_work(self) -> int:
        """Number of items whose step would take as long as a first step, at least 1."""
        more_s = max(0.0, self.first_s - self.fixed_s)
        return max(1, round(more_s / self.per_item_s)) if self.per_item_s else 1

    def item_s(self, slots: int) -> float:
        """Seconds that an item takes of a worker whose slots are all taken."""
        return self.first_s + self.count * self.step_s(slots) / slots


class ModelLoad(ItemLoad):
    """The requests for one model, and what its workers take for an item, alone on their GPU."""

    arrivals: tuple[Arrivals, ...] = ()
    """Of its own requests. Empty: only flows ask for it."""
    steps: StepsLoad | None = None
    """Step times with continuous batching. None if a worker computes whole batches."""
    fixed_s: Seconds = 0.0
    """Seconds of a batch that do not depend on its items."""
    measured: str = Field(min_length=1)
    """The source of the seconds: command, GPU and day."""
    spread: Literal["none", "exponential"] = "none"
    """The distribution of batch seconds. `exponential` is for comparisons with theory."""
    items_per_request: int = Field(1, ge=1, le=16)
    batch_lane_share: float = Field(0.0, ge=0, le=1)
    """Share of the requests at `batch` priority."""
    deadline_s: float | None = Field(None, gt=0)
    """Default: the catalog's."""
    start_replicas: int | None = Field(None, ge=0)
    """Replicas of each region that are ready at the start. Default: replicas.min."""

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if (self.item_s is None) == (self.steps is None):
            raise ValueError("a model has one of seconds_per_item, seconds_per_work and steps")
        return self

    def full_item_s(self, batch: int) -> float:
        """Seconds that an item takes of a worker that is full, alone on its GPU."""
        return self.batch_s(batch) / batch if self.steps is None else self.steps.item_s(batch)

    def batch_s(self, items: int) -> float:
        """Seconds of a worker that is alone on its GPU for a batch."""
        assert self.item_s is not None, "checked when it was read; this is a bug"
        return self.fixed_s + self.item_s * items
