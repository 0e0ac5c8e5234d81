"""Work and time per item, using the same fields in a plan's rates and a scenario's loads."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from penstock_planning.entry import Entry
from penstock_planning.task_samples import SAMPLES
from shared.errors import ConfigurationError
from shared.models.catalog import Model


class ItemLoad(Entry):
    """A typical item for a model."""

    seconds_per_item: float | None = Field(None, gt=0)
    """Seconds that one worker takes per item, in full batches.

    Generating a text alone takes many times as long as its share of a full worker.
    """
    seconds_per_work: float | None = Field(None, gt=0)
    """Used in place of seconds per item for a class with `work`: worker seconds per unit of work.
    """
    work_per_item: float | None = Field(None, gt=0)
    """Average result of the class's `work` for an item. batch.max_work then limits the batch."""
    tokens_per_item: float | None = Field(None, gt=0)
    """Tokens per item. If this is set, batch.max_tokens limits the batch; otherwise,
    batch.max_items does.

    Tokens for a generated text: its prompt and its `max_tokens`.
    """
    measured: str = ""
    """Source of the seconds: the command, GPU, and date."""
    host_seconds_per_item: float | None = Field(None, gt=0)
    """CPU seconds per item in a worker's I/O process, which uses at most one core.

    If that takes longer than the GPU, more workers must share a GPU.
    """
    kept_when_sharing: float = Field(1.0, gt=0, le=1)
    """Share of a GPU's rate that remains when workers share it, as measured by bench.gpu."""

    @model_validator(mode="after")
    def _seconds_are_said_once(self) -> Self:
        if self.seconds_per_work is None:
            return self
        if self.seconds_per_item is not None:
            raise ValueError("seconds_per_work and seconds_per_item are mutually exclusive")
        if self.work_per_item is None:
            raise ValueError("work_per_item is required with seconds_per_work")
        return self

    @property
    def item_s(self) -> float | None:
        """Worker seconds per item, in full batches. None if not specified."""
        if self.seconds_per_work is None or self.work_per_item is None:
            return self.seconds_per_item
        return self.seconds_per_work * self.work_per_item


def check_work(model: Model, load: ItemLoad, where: str) -> None:
    """Checks that the work specified per item fits the class.

    Raises:
        ConfigurationError: the field is missing even though it limits the batch, or the class does
        not use it.
    """
    max_work, work = model.work.max, load.work_per_item
    field = f"{where}.work_per_item"
    if work is None:
        if model.batch.max_work is not None and load.item_s is not None:
            raise ConfigurationError(
                f"{field} is required: the value that the class's `work` method returns for a "
                "typical input; batch.max_work limits a batch by these values",
                field=field,
            )
    elif max_work is None:
        raise ConfigurationError(
            f"{field}: must not be set because the model has no `work`", field=field
        )
    elif work > max_work:
        raise ConfigurationError(
            f"{field} exceeds the catalog's work.max ({max_work})", field=field
        )


def job_items(model: Model, load: ItemLoad) -> int:
    """Returns the maximum number of typical items in one job."""
    return model.definition.largest_job(model, _item_work(model, load) or math.inf)


def _item_work(model: Model, load: ItemLoad) -> float | None:
    units = load.work_per_item if model.definition.unit == "work" else load.tokens_per_item
    return SAMPLES[model.task].work(model, units)


def batch_items(model: Model, load: ItemLoad) -> int:
    """Returns the size of a full batch: typical items that fit the budget, at most max_items."""
    item_work = _item_work(model, load)
    return (
        max(1, min(model.batch.max_items, int(model.budget // item_work)))
        if item_work
        else model.batch.max_items
    )
