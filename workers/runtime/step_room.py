"""How much of a model process the items of a SteppedModel take, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from shared.catalog import Model
from shared.step_time import StepTime

SHARED_WEIGHTS_SHARE = 0.5
"""The guess for a model whose steps read all weights once: a step that writes a token of each place
takes twice the fixed time. SmolLM2-135M: 16 texts 1.8 to 4.1 times one (docs/text.md)."""


class StepRoom:
    """The room of a model in a process, and what of it was spare in the steps so far.

    Args:
        model: the entry of the catalog.
    """

    def __init__(self, model: Model) -> None:
        self._max_items = model.batch.max_items
        self._budget = model.budget
        share = SHARED_WEIGHTS_SHARE if model.definition.shares_weights else 0.0
        self._time = StepTime(share, full_work=self._max_items)

    def spare_s(self, rooms: Sequence[int], work: int, seconds: float) -> float:
        """Takes note of a step. Returns which of its seconds others could have used for nothing.

        Args:
            rooms: what each item that was in takes of the budget.
            work: that the step computed. 0: not known, so each item counts as one.
            seconds: that it took.
        """
        fill = min(1.0, max(len(rooms) / self._max_items, sum(rooms) / self._budget))
        work = work or max(1, len(rooms))
        self._time.observe(work, seconds)
        return self._time.spare_s(fill, work, seconds)
