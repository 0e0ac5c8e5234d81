"""A flow run's state, and what is derived from it: values, steps that can start, and failures.

The state is rebuilt from Redis (shared/stores/flow_runs.py) at every step, so nothing has to be
kept up to date.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from shared.errors import BadInput, ModelFailed, error_for_code
from shared.messages import ItemError, ItemOutcome, JobBody
from shared.models.after_image import images_of
from shared.models.blob import RESULTS
from shared.models.flow_plan import (
    INPUT,
    MAX_STEP_ITEMS,
    MISSING,
    FlowPlan,
    FlowStep,
    index_of,
    input_named,
    output_of,
    step_of,
    value_of,
)
from shared.models.tasks import Result
from shared.models.tasks.custom import CustomInput, CustomResult, with_places
from shared.models.tasks.image import ImagesInput
from shared.stores.flow_runs import FlowRuns, RunState

_outcomes = msgspec.json.Decoder(ItemOutcome)
_bodies = msgspec.json.Decoder(JobBody)
_inputs = msgspec.json.Decoder(CustomInput | ImagesInput)

PAGE_ITEMS = 64
"""Number of item outcomes to read at a time."""


class Run:
    """A run as stored in Redis, and what can be derived from it.

    Raises:
        BadInput: a value does not match the plan.
    """

    def __init__(self, run_id: str, plan: FlowPlan, state: RunState) -> None:
        self.id = run_id
        self.state = state
        self.plan = plan
        self.outcomes = {index: _outcomes.decode(data) for index, data in state.outcomes.items()}
        self.scope: dict[str, Any] = {INPUT: self._input()}
        self.ready: list[int] = []
        """Steps that can be planned."""
        self.unpublished: list[int] = []
        """Planned steps that may not have reached the broker."""
        for number in self.plan.order():
            self._take(number)

    def _input(self) -> dict[str, Any]:
        values = {name: shape.get("default") for name, shape in self.plan.input.items()}
        if self.state.input is not None:
            values |= _inputs.decode(self.state.input).step_value()
        return {name: MISSING if value is None else value for name, value in values.items()}

    def _take(self, number: int) -> None:
        step, known = self.plan.steps[number], self.state.steps.get(number)
        if not step.depends_on <= self.scope.keys():
            return
        if known is None:
            self.ready.append(number)
        elif known.done < known.items:
            if not known.is_published:
                self.unpublished.append(number)
        else:
            results = {
                position: outcome.result.step_value()
                for position, outcome in self._of_step(number)
                if outcome.result is not None
            }
            self.scope[step.id] = value_of(step, results, self.scope)

    def _of_step(self, number: int) -> Iterator[tuple[int, ItemOutcome]]:
        for index, outcome in self.outcomes.items():
            if step_of(index) == number:
                yield index % MAX_STEP_ITEMS, outcome

    @property
    def is_over(self) -> bool:
        return all(step.id in self.scope for step in self.plan.steps)

    def check(self) -> None:
        """Fails the run if an item has failed in a step without a default.

        Raises:
            RunFailed: contains the error from the first such item.
        """
        for index in sorted(self.outcomes):
            outcome, step = self.outcomes[index], self.plan.steps[step_of(index)]
            is_borne = step.has_default and outcome.status == "failed"
            if outcome.error is not None and not is_borne:
                if self.plan.gives == "images" and step_of(index) == 0:
                    raise RunFailed(outcome.error)  # the error was caused by the caller's input
                raise RunFailed(_error_of_step(step, index, outcome.error))

    def output(self) -> Result:
        """Returns the flow's output, once all steps are finished.

        Raises:
            BadInput: a reference has no value. ModerationBlocked: all images were withheld.
            ModelFailed: a model returned an unexpected type.
        """
        if self.plan.gives == "images":
            image_indices = sorted(index for index in self.outcomes if step_of(index) == 0)
            return images_of(self.scope, [self.outcomes[index].result for index in image_indices])
        return CustomResult(*with_places(output_of(self.plan, self.scope)))

    @property
    def receipts(self) -> list[ItemOutcome]:
        """Returns the outcomes of all items, without their results."""
        return receipts_of(self.state)


class RunFailed(BadInput):
    """The run ends with a step's error."""

    def __init__(self, error: ItemError) -> None:
        super().__init__(error.message, field=error.field)
        self.code = error.code


async def list_own_objects(runs: FlowRuns, run_id: str) -> list[str]:
    """Returns the keys of files a run created, except files that the cache may reference."""
    state = await runs.read(run_id)
    bodies = map(_bodies.decode, await runs.read_planned(run_id))
    uncached = [item.index for body in bodies for item in body.items if not item.cache_key]
    results = [
        _outcomes.decode(state.outcomes[index]).result
        for index in uncached
        if index in state.outcomes
    ]
    blobs = [blob for result in results if result is not None for blob in result.blobs]
    # A class may return a file that was passed to it.
    own = f"{RESULTS}/{run_id}/"
    return [key for blob in blobs if (key := blob.object_key) and key.startswith(own)]


async def outcomes_after(
    runs: FlowRuns, run_id: str, plan: FlowPlan, seen: int, *, is_over: bool
) -> AsyncIterator[tuple[int, ItemOutcome]]:
    """Yields a run's finished items, in step and position order.

    An item is yielded only after all preceding items that may still finish.

    Args:
        seen: number of the last known item, or -1 if none.

    Yields:
        The item's number in this order, and its outcome.
    """
    progress = await runs.progress(run_id, len(plan.steps))
    first = max(0, seen + 1)
    for rank, number in enumerate(plan.order()):
        if first >= (rank + 1) * MAX_STEP_ITEMS:
            continue
        known = progress[number]
        is_complete = is_over or (known is not None and known[1] >= known[0])
        remaining = known[1] if known is not None else 0
        position = max(0, first - rank * MAX_STEP_ITEMS)
        while remaining > 0 and position < MAX_STEP_ITEMS:
            page = range(position, min(position + PAGE_ITEMS, MAX_STEP_ITEMS))
            indexes = [index_of(number, item) for item in page]
            for item, data in zip(page, await runs.outcomes(run_id, indexes), strict=True):
                if data is not None:
                    remaining -= 1
                    yield rank * MAX_STEP_ITEMS + item, _outcomes.decode(data)
                elif not is_complete:
                    return
            position = page.stop
            if plan.steps[number].for_each is None:
                break
        if not is_complete:
            return


def receipts_of(state: RunState) -> list[ItemOutcome]:
    """Returns the outcomes of a run's items, in order, without their results."""
    outcomes = [_outcomes.decode(state.outcomes[index]) for index in sorted(state.outcomes)]
    return [msgspec.structs.replace(outcome, result=None, logs=None) for outcome in outcomes]


def _error_of_step(step: FlowStep, index: int, error: ItemError) -> ItemError:
    position = index % MAX_STEP_ITEMS
    item = "" if step.for_each is None else f", item {position}"
    known = error_for_code(error.code, error.message)
    if isinstance(known, BadInput):
        own = input_named(step.origins_of(error.field or "", position))
        if own is not None:
            reason = error.message.removeprefix(f"{error.field}: ")
            return ItemError(error.code, f"{own}: {reason}", own)
        # not the caller's mistake, because the value came from the previous step
        known = ModelFailed(error.message)
    return ItemError(known.code, f"step {step.id!r}{item}: {error.message}")
