"""The thread that runs steps never waits for the device, and never encodes large images."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from shared.models.catalog import Catalog
from shared.models.schedulers import SCHEDULER_NAMES
from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_steps import own_model, prepared, run
from workers.models.image import model as image_model
from workers.models.image.model import ImageModel
from workers.models.image.vae import HostCopy, copy_to_host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

STEPS = 4


class Moment(NamedTuple):
    kind: str
    thread: int


class Timeline:
    """Records a model's steps, its waits for copies, and its encoding of PNG files.

    As on an asynchronous device, a copy finishes only after another step has begun.
    """

    def __init__(self, model: ImageModel, patch: pytest.MonkeyPatch) -> None:
        self.moments: list[Moment] = []
        self._has_stepped = threading.Event()
        model._main.unet.register_forward_pre_hook(lambda *given: self._note_step())
        patch.setattr(image_model, "copy_to_host", self._copy)
        save = Image.Image.save

        def save_noted(image: Image.Image, *given: Any, **named: Any) -> None:
            self._note("png")
            save(image, *given, **named)

        patch.setattr(Image.Image, "save", save_noted)

    def _note(self, kind: str) -> None:
        self.moments.append(Moment(kind, threading.get_ident()))

    def _note_step(self) -> None:
        self._note("step")
        if any(moment.kind == "copy" for moment in self.moments):
            self._has_stepped.set()

    def _copy(self, images: torch.Tensor) -> HostCopy:
        copied = copy_to_host(images)
        copied.is_there = self
        return copied

    def synchronize(self) -> None:
        """Waits for a copy, in place of a CUDA event."""
        self._note("copy")
        assert self._has_stepped.wait(WAIT_LIMIT_S), "the steps waited for the copy"

    def threads(self, kind: str) -> set[int]:
        return {moment.thread for moment in self.moments if moment.kind == kind}


def test_copies_and_files_are_made_while_other_images_take_steps(
    catalog: Catalog, family: TinyPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model(catalog, family.folder)
    large = msgspec.structs.replace(TEXT, width=136, height=136, steps=2)
    long = msgspec.structs.replace(large, steps=12, seed=2)
    alone = run(model, family.preparer, [(0, large)])[0]
    timeline = Timeline(model, monkeypatch)
    results = run(model, family.preparer, [(0, large), (0, long)])
    assert isinstance(alone, ImageResult)
    result = results[0]
    assert isinstance(result, ImageResult)
    assert np.abs(pixels(result) - pixels(alone)).max() <= 1
    kinds = [moment.kind for moment in timeline.moments]
    assert kinds.count("copy") == kinds.count("png") == 2
    own = {threading.get_ident()}
    assert timeline.threads("step") == own
    assert not timeline.threads("copy") & own
    assert not timeline.threads("png") & own
    first_copy, first_file = kinds.index("copy"), kinds.index("png")
    assert "step" in kinds[first_copy:first_file]


def on_meta_device(catalog: Catalog, family: TinyPipeline) -> ImageModel:
    """A model on a device without data, from which reading a number is an error."""
    model = own_model(catalog, family.folder)
    model._main.to("meta")
    model._device = torch.device("meta")
    return model


def take_steps(model: ImageModel, family: TinyPipeline, values: Sequence[ImageInput]) -> list[Any]:
    """Draws images together for a few steps. Returns the results, which are errors."""
    for slot, value in enumerate(values):
        model.admit(slot, prepared(family.preparer, value))
    return [result for _ in range(STEPS) for result in model.step().results.values()]


@pytest.mark.parametrize("value", [TEXT, FROM_IMAGE], ids=["text", "image"])
def test_steps_never_wait_for_the_device(
    catalog: Catalog, family: TinyPipeline, value: ImageInput
) -> None:
    """For example, no scheduler calls `.item()` on a tensor of the device."""
    values = [
        msgspec.structs.replace(value, scheduler=scheduler, steps=4 * STEPS)
        for scheduler in SCHEDULER_NAMES
    ]
    assert take_steps(on_meta_device(catalog, family), family, values) == []


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.cpu, bool])
def test_a_wait_for_the_device_is_an_error(
    catalog: Catalog, family: TinyPipeline, read: Any
) -> None:
    """Shows that the test above would notice one."""
    model = on_meta_device(catalog, family)

    def wait(module: Any, given: Any, output: torch.Tensor) -> None:
        read(output.sum())

    model._main.unet.conv_in.register_forward_hook(wait)
    (result,) = take_steps(model, family, [TEXT])
    assert "meta" in result.message
