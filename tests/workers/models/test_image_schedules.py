"""Whatever happens around an image, its pixels and its charge are those of an image alone.

Others join, are canceled, start over for more urgent ones, fail, and find too little memory.
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


class Arrival(NamedTuple):
    """An image, the step before which it comes, and what happens to it after some steps."""

    joins: int
    value: ImageInput
    event: str
    after: int


ARRIVALS = st.builds(
    Arrival,
    joins=st.integers(0, 6),
    value=st.sampled_from([*VALUES, BAD]),
    event=st.sampled_from(["nothing", "nothing", "cancel", "preempt"]),
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
    """Within it the device has room for so many rows, and can't compute BAD_PROMPT."""
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
    """Draws a plan as a worker does: what was preempted starts over once there are fewer."""

    def __init__(self, model: ImageModel, preparer: Preparer, plan: Sequence[Arrival]) -> None:
        self._model, self._preparer, self._plan = model, preparer, plan
        self._inside: dict[int, int] = {}
        """Steps of each image so far."""
        self._again: list[int] = []
        self._due = {slot for slot, one in enumerate(plan) if one.event != "nothing"}
        """The images whose event has yet to come."""
        self.results: dict[int, Result | PenstockError] = {}

    def draw(self) -> dict[int, Result | PenstockError]:
        for step in range(MAX_STEPS):
            self._admit([slot for slot, one in enumerate(self._plan) if one.joins == step])
            self._interrupt()
            if self._inside:
                self._step()
            elif not self._again and step >= max(one.joins for one in self._plan):
                assert not self._model.progress()
                return self.results
        raise AssertionError("the images never ended")

    def _admit(self, coming: list[int]) -> None:
        if self._again and len(self._inside) < 2:
            coming.append(self._again.pop(0))
        for slot in coming:
            self._model.admit(slot, prepared(self._preparer, self._plan[slot].value))
            self._inside[slot] = 0

    def _interrupt(self) -> None:
        for slot in self._due & self._inside.keys():
            if self._inside[slot] == self._plan[slot].after:
                self._due.remove(slot)
                self._drop(slot, starts_over=self._plan[slot].event == "preempt")

    def _drop(self, slot: int, *, starts_over: bool) -> None:
        self._model.drop(slot)
        del self._inside[slot]
        if starts_over:
            self._again.append(slot)

    def _step(self) -> None:
        end = self._model.step()
        for slot in end.preempted:
            self._drop(slot, starts_over=True)
        for slot, result in end.results.items():
            assert slot not in self.results
            self.results[slot] = result
            del self._inside[slot]
        self._inside = {slot: steps + 1 for slot, steps in self._inside.items()}


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
    with scarce(model, rows):
        results = Worker(model, tiny_preparer, plan).draw()
    for slot, one in enumerate(plan):
        result = results.get(slot)
        if result is None:
            assert one.event == "cancel"
        elif slot in good:
            assert difference(result, expected[slot]) <= 1
        else:
            assert isinstance(result, ModelFailed)
            assert "this image breaks its batch" in result.message
