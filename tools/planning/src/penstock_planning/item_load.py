"""What an item weighs and takes, in the same words for rates of a plan and loads of a scenario."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from penstock_planning.entry import Entry
from penstock_planning.task_samples import SAMPLES
from shared.catalog import Model
from shared.errors import ConfigurationError


class ItemLoad(Entry):
    """A usual item of one model."""

    seconds_per_item: float | None = Field(None, gt=0)
    """Seconds of one worker per item, in full batches.

    A text that is written alone takes many times its part of a full worker.
    """
    seconds_per_work: float | None = Field(None, gt=0)
    """Instead of it, for a class with `work`: seconds of one worker per unit of work."""
    work_per_item: float | None = Field(None, gt=0)
    """What `work` of a class returns for an item, on average. With it, batch.max_work bounds the
    batch.
    """
    tokens_per_item: float | None = Field(None, gt=0)
    """With it, batch.max_tokens bounds the batch. Without it, batch.max_items.

    Of a text that is written: its prompt and its `max_tokens`.
    """
    measured: str = ""
    """The source of the seconds: command, GPU and day."""
    kept_when_sharing: float = Field(1.0, gt=0, le=1)
    """The share of a GPU's rate that is left when workers share it, measured by bench.gpu."""

    @model_validator(mode="after")
    def _seconds_are_said_once(self) -> Self:
        if self.seconds_per_work is None:
            return self
        if self.seconds_per_item is not None:
            raise ValueError("seconds_per_work: there is seconds_per_item; leave one of them out")
        if self.work_per_item is None:
            raise ValueError("work_per_item is missing: with it, seconds_per_work says seconds")
        return self

    @property
    def item_s(self) -> float | None:
        """Seconds of one worker per item, in full batches. None: not said."""
        if self.seconds_per_work is None or self.work_per_item is None:
            return self.seconds_per_item
        return self.seconds_per_work * self.work_per_item


def check_work(model: Model, load: ItemLoad, where: str) -> None:
    """Checks that what an item weighs fits the class.

    Raises:
        ConfigurationError: it is missing and would bound the batch, or it is not the class's.
    """
    most, work = model.work.max, load.work_per_item
    field = f"{where}.work_per_item"
    if work is None:
        if model.batch.max_work is not None and load.item_s is not None:
            raise ConfigurationError(
                f"{field} is missing: what `work` of the class returns for a usual input; "
                "batch.max_work bounds the batch by it",
                field=field,
            )
    elif most is None:
        raise ConfigurationError(f"{field}: the model has no `work`; leave it out", field=field)
    elif work > most:
        raise ConfigurationError(f"{field}: above work.max of the catalog ({most})", field=field)


def batch_items(model: Model, load: ItemLoad) -> int:
    """Items of a full batch: the usual items that fit the budget, at most max_items."""
    units = load.work_per_item if model.definition.unit == "work" else load.tokens_per_item
    one = SAMPLES[model.task].work(model, units)
    return (
        max(1, min(model.batch.max_items, int(model.budget // one)))
        if one
        else model.batch.max_items
    )
