"""No matter what happens, an image gets the same pixels and charge as if it were drawn by itself.

Other images join, are canceled, are preempted by more urgent ones, start over, fail, and run out of
memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ModelFailed, PenstockError
from shared.models.catalog import Catalog
from shared.models.tasks import Result
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.test_image import FROM_IMAGE, TEXT
from tests.workers.models.test_image_masks import as_png, box
from tests.workers.models.test_image_steps import Alone, difference, own_model, prepared, run
from workers.models.base import Preparer
from workers.models.image.model import ImageModel

pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

BAD_PROMPT = "a prompt that the device can not compute"
VALUES = [
    msgspec.structs.replace(TEXT, steps=3, scheduler="euler_a"),
    msgspec.structs.replace(TEXT, steps=5, scheduler="dpmpp_2m", guidance_scale=1.0),
    msgspec.structs.replace(TEXT, steps=4, width=72, height=48),
    msgspec.structs.replace(FROM_IMAGE, steps=5),
    msgspec.structs.replace(FROM_IMAGE, steps=5, mask=as_png(box(16, 16, 48, 48))),
]
BAD = msgspec.structs.replace(TEXT, steps=4, prompt=BAD_PROMPT)
MAX_STEPS = 200
SLOTS = 3


class Arrival(NamedTuple):
    """An image, the step before which it joins, and an event that affects it after some steps."""

    joins: int
    value: ImageInput
    is_urgent: bool
    event: str
    after: int


ARRIVALS = st.builds(
    Arrival,
    joins=st.integers(0, 6),
    value=st.sampled_from([*VALUES, BAD]),
    is_urgent=st.booleans(),
    event=st.sampled_from(["nothing", "nothing", "cancel", "preempt", "start over"]),
    after=st.integers(0, 4),
)


@pytest.fixture(scope="module")
def model(catalog: Catalog, tiny_folder: Path) -> ImageModel:
    return own_model(catalog, tiny_folder)


@pytest.fixture(scope="module")
def alone(model: ImageModel, tiny_preparer: Preparer) -> Alone:
    def draw(value: ImageInput) -> ImageResult:
        result = run(model, tiny_preparer, [(0, value)])[0]
        assert isinstance(result, ImageResult)
        return result

    return Alone(draw)


@contextmanager
def scarce(model: ImageModel, rows: int) -> Iterator[None]:
    """In this block, the device has room for this many rows and can't compute BAD_PROMPT."""
    pipeline = model._main
    with torch.inference_mode():
        bad = pipeline.encode_prompt(BAD_PROMPT, "cpu", 1, False)[0]

    def check(unet: Any, args: Any, kwargs: dict[str, Any]) -> None:
        prompts = kwargs["encoder_hidden_states"]
        if len(prompts) > rows:
            raise torch.OutOfMemoryError("out of memory")
        if any(torch.equal(one, bad[0]) for one in prompts):
            raise RuntimeError("this image breaks its batch")

    hook = pipeline.unet.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class Worker:
    """Draws a plan as a worker does: urgent images first, preempting others."""

    def __init__(self, model: ImageModel, preparer: Preparer, plan: Sequence[Arrival]) -> None:
        self._model, self._preparer, self._plan = model, preparer, plan
        self._inside: dict[int, int] = {}
        """The number of steps computed so far for each image."""
        self._waiting: list[int] = []
        self.work = 0
        """Pixels computed across all steps."""
        self.has_lost_work = False
        """True if an image had to start over, or was canceled."""
        self._due = {slot for slot, one in enumerate(plan) if one.event != "nothing"}
        """The images whose event has not happened yet."""
        self.results: dict[int, Result | PenstockError] = {}

    def draw(self) -> dict[int, Result | PenstockError]:
        for step in range(MAX_STEPS):
            self._waiting += [
                slot for slot, arrival in enumerate(self._plan) if arrival.joins == step
            ]
            self._interrupt()
            self._admit()
            if self._inside:
                self._step()
            elif step >= max(arrival.joins for arrival in self._plan):
                assert not self._model.progress()
                return self.results
        raise AssertionError("the images never ended")

    def _admit(self) -> None:
        self._waiting.sort(key=self._is_urgent, reverse=True)
        while self._waiting and self._has_room_for(self._waiting[0]):
            slot = self._waiting.pop(0)
            self._model.admit(slot, prepared(self._preparer, self._plan[slot].value))
            self._inside[slot] = 0

    def _is_urgent(self, slot: int) -> bool:
        return self._plan[slot].is_urgent

    def _has_room_for(self, slot: int) -> bool:
        others = [other for other in self._inside if not self._is_urgent(other)]
        if len(self._inside) >= SLOTS and self._is_urgent(slot) and others:
            self._preempt(others[-1])
        return len(self._inside) < SLOTS

    def _interrupt(self) -> None:
        for slot in self._due & self._inside.keys():
            event, after = self._plan[slot].event, self._plan[slot].after
            if self._inside[slot] == after:
                self._due.remove(slot)
                if event == "preempt":
                    self._preempt(slot)
                else:
                    self._drop(slot, starts_over=event == "start over")

    def _preempt(self, slot: int) -> None:
        self._model.interrupt(slot)
        del self._inside[slot]
        self._waiting.append(slot)

    def _drop(self, slot: int, *, starts_over: bool) -> None:
        self._model.drop(slot)
        del self._inside[slot]
        self.has_lost_work = True
        if starts_over:
            self._waiting.append(slot)

    def _step(self) -> None:
        end = self._model.step()
        self.work += end.work
        for slot in end.preempted:
            self._drop(slot, starts_over=True)
        for slot, result in end.results.items():
            assert slot not in self.results
            self.results[slot] = result
            del self._inside[slot]
        self._inside = {slot: steps + 1 for slot, steps in self._inside.items()}


def work_of(value: ImageInput) -> int:
    """The work it takes to draw a whole image."""
    steps = int(value.steps * (value.strength or 1.0))
    rows = 2 if value.guidance_scale > 1 else 1
    return rows * value.width * value.height * steps


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=st.lists(ARRIVALS, min_size=1, max_size=5), rows=st.sampled_from([2, 4, 100]))
def test_any_schedule_leaves_pixels_and_charges_as_they_are(
    model: ImageModel,
    tiny_preparer: Preparer,
    alone: Alone,
    plan: list[Arrival],
    rows: int,
) -> None:
    plan = [
        one._replace(value=msgspec.structs.replace(one.value, seed=seed))
        for seed, one in enumerate(plan)
    ]
    good = {slot: one for slot, one in enumerate(plan) if one.value.prompt != BAD_PROMPT}
    expected = {slot: alone(one.value) for slot, one in good.items()}
    worker = Worker(model, tiny_preparer, plan)
    with scarce(model, rows):
        results = worker.draw()
    if not worker.has_lost_work and len(good) == len(plan):
        assert worker.work == sum(work_of(arrival.value) for arrival in plan), (
            "a step was computed twice"
        )
    for slot, one in enumerate(plan):
        result = results.get(slot)
        if result is None:
            assert one.event == "cancel"
        elif slot in good:
            assert difference(result, expected[slot]) <= 1
        else:
            assert isinstance(result, ModelFailed)
            assert "this image breaks its batch" in result.message
