"""A scenario's requests for one model, and the worker time that they need."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock_planning.entry import Entry
from penstock_planning.item_load import ItemLoad
from penstock_planning.simulation.streams import Arrivals, Seconds


class StepsLoad(Entry):
    """A worker's step times with continuous batching."""

    count: float = Field(gt=0)
    """Average steps per item."""
    spread: Literal["none", "exponential"] = "exponential"
    """Distribution of the number of steps."""
    fixed_s: Seconds
    """Fixed seconds per step."""
    per_item_s: Seconds
    """Additional seconds for each item in the step."""
    first_s: Seconds = 0.0
    """Duration, in seconds, of an item's first step, during which the others wait while its prompt
    is read.
    """

    def step_s(self, items: int) -> float:
        """Returns the duration of a step, in seconds, for a worker that has its GPU to itself."""
        return self.fixed_s + self.per_item_s * items

    @property
    def first_work(self) -> int:
        """Number of items at which a step takes as long as a first step, at least 1."""
        more_s = max(0.0, self.first_s - self.fixed_s)
        return max(1, round(more_s / self.per_item_s)) if self.per_item_s else 1

    def item_s(self, slots: int) -> float:
        """Returns the seconds per item for a worker whose slots are all in use."""
        return self.first_s + self.count * self.step_s(slots) / slots


class ModelLoad(ItemLoad):
    """The requests for one model, and the worker time per item with a GPU to itself."""

    arrivals: tuple[Arrivals, ...] = ()
    """Arrivals of direct requests. Empty if only flows use the model."""
    steps: StepsLoad | None = None
    """Step times with continuous batching. None if a worker computes whole batches."""
    fixed_s: Seconds = 0.0
    """Fixed seconds per batch."""
    measured: str = Field(min_length=1)
    """Source of the seconds: the command, GPU, and date."""
    spread: Literal["none", "exponential"] = "none"
    """Distribution of the batch seconds. `exponential` is for comparisons with theory."""
    items_per_request: int = Field(1, ge=1, le=16)
    batch_lane_share: float = Field(0.0, ge=0, le=1)
    """Share of requests with `batch` priority."""
    deadline_s: float | None = Field(None, gt=0)
    """Defaults to the value in the catalog."""
    start_replicas: int | None = Field(None, ge=0)
    """Ready replicas per region at the start. Defaults to replicas.min."""

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if (self.item_s is None) == (self.steps is None):
            raise ValueError(
                "exactly one of seconds_per_item, seconds_per_work and steps is required"
            )
        return self

    def full_item_s(self, batch: int) -> float:
        """Returns the seconds per item for a full worker that has its GPU to itself."""
        return self.batch_s(batch) / batch if self.steps is None else self.steps.item_s(batch)

    def batch_s(self, items: int) -> float:
        """Returns the seconds per batch for a worker that has its GPU to itself."""
        assert self.item_s is not None, "checked when it was read; this is a bug"
        return self.fixed_s + self.item_s * items
