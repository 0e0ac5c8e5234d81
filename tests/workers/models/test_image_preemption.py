"""Preempted images wait in their process and resume where they left off."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shared.broker.in_memory import InMemoryBroker
from shared.errors import PenstockError
from shared.models.catalog import Catalog, Model
from shared.models.tasks import Result
from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.test_image import TEXT
from tests.workers.models.test_image_steps import difference, prepared
from workers.models.base import OutOfMemory, PreparedItem, Preparer, StepEnd
from workers.models.device import Device
from workers.models.image import image_files
from workers.models.image.model import ImageModel
from workers.models.image.vae import encode
from workers.testing import running_worker

pytestmark = [
    pytest.mark.slow(about_s=30),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

LONG = msgspec.structs.replace(TEXT, steps=6)
LARGE = msgspec.structs.replace(TEXT, width=192, height=192, steps=2)
"""Large enough that a thread is used to write the file."""
ENDLESS = msgspec.structs.replace(TEXT, steps=100)


class Watched(ImageModel):
    """Adds up the work of its steps and tracks which images are in the batch."""

    work = 0

    def __init__(self, entry: Model, folder: Path) -> None:
        super().__init__(entry, folder, Device("cpu", threads=1, memory_fraction=1.0))
        self.inside: set[int] = set()
        self.interrupted = 0

    def warmup(self) -> None:
        super().warmup()
        self.inside.clear()
        self.work = 0

    def admit(self, slot: int, item: PreparedItem) -> None:
        super().admit(slot, item)
        self.inside.add(slot)

    def step(self) -> StepEnd:
        end = super().step()
        self.work += end.work
        self.inside -= {*end.results, *end.preempted}
        return end

    def interrupt(self, slot: int) -> None:
        super().interrupt(slot)
        self.inside.remove(slot)
        self.interrupted += 1

    def draw(self) -> dict[int, Result | PenstockError]:
        """Runs steps until the whole batch has finished. Returns the results."""
        results: dict[int, Result | PenstockError] = {}
        while self.inside:
            results |= self.step().results
        return results


def with_room(catalog: Catalog, images: int) -> Model:
    """A model entry whose batches have room for this many images."""
    entry = catalog.default("image")
    return entry.model_copy(update={"batch": entry.batch.model_copy(update={"max_items": images})})


@pytest.fixture(scope="module")
def model(catalog: Catalog, tiny_folder: Path) -> Watched:
    model = Watched(with_room(catalog, 2), tiny_folder)
    model.setup()
    return model


def work_of(value: ImageInput) -> int:
    """The work for a whole image, with one row per prompt."""
    return 2 * value.width * value.height * value.steps


@contextmanager
def counted(model: Watched, *values: ImageInput) -> Iterator[None]:
    """Checks that each step of these images is computed exactly once inside the block."""
    before = model.work
    yield
    assert model.work - before == sum(map(work_of, values))


@pytest.mark.parametrize("steps", range(7))
def test_a_preempted_image_continues_where_it_was(
    model: Watched, tiny_preparer: Preparer, steps: int
) -> None:
    model.admit(0, prepared(tiny_preparer, LONG))
    alone = model.draw()[0]
    assert isinstance(alone, ImageResult)
    others = [msgspec.structs.replace(TEXT, seed=seed, steps=3) for seed in (7, 8)]
    with counted(model, LONG, *others):
        model.admit(1, prepared(tiny_preparer, LONG))
        for slot, other in enumerate(others, 2):
            model.admit(slot, prepared(tiny_preparer, other))
        for _ in range(min(steps, LONG.steps - 1)):
            model.step()
        model.interrupt(1)
        assert 1 not in model.progress()
        assert model.draw().keys() <= {2, 3}
        model.admit(4, prepared(tiny_preparer, LONG))
        assert difference(model.draw()[4], alone) <= 1


def test_an_image_whose_file_is_being_made_is_not_drawn_again(
    model: Watched, tiny_preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def encode_later(pixels: np.ndarray) -> bytes:
        assert len(pixels) != LARGE.height or may_end.wait(WAIT_LIMIT_S)
        return encode(pixels)

    monkeypatch.setattr(image_files, "encode", encode_later)
    with counted(model, LARGE, LONG):
        model.admit(0, prepared(tiny_preparer, LARGE))
        model.admit(1, prepared(tiny_preparer, LONG))
        while 0 in model.progress():
            model.step()
        model.interrupt(0)
        assert model.draw().keys() == {1}
        may_end.set()
        model.admit(2, prepared(tiny_preparer, LARGE))
        assert isinstance(model.draw()[2], ImageResult)


def test_images_that_wait_take_no_more_than_a_batch(
    model: Watched, tiny_preparer: Preparer
) -> None:
    """The oldest image starts over: it redraws two steps."""
    values = [msgspec.structs.replace(LONG, seed=seed) for seed in range(3)]
    again = msgspec.structs.replace(LONG, steps=2)
    with counted(model, *values, again):
        for slot, value in enumerate(values):
            model.admit(slot, prepared(tiny_preparer, value))
            model.step()
            model.step()
            model.interrupt(slot)
        for slot, value in enumerate(values):
            model.admit(slot, prepared(tiny_preparer, value))
        assert all(isinstance(drawn, ImageResult) for drawn in model.draw().values())


def test_images_that_wait_make_room_when_memory_is_short(
    model: Watched, tiny_preparer: Preparer
) -> None:
    other = msgspec.structs.replace(TEXT, seed=9)
    model.admit(0, prepared(tiny_preparer, LONG))
    model.step()
    model.interrupt(0)
    with without_memory(model):
        model.admit(1, prepared(tiny_preparer, other))
        assert model.step().preempted == [1]
        model.admit(1, prepared(tiny_preparer, other))
        assert isinstance(model.step().results[1], OutOfMemory)
    with counted(model, LONG):
        model.admit(0, prepared(tiny_preparer, LONG))
        assert isinstance(model.draw()[0], ImageResult)


@contextmanager
def without_memory(model: ImageModel) -> Iterator[None]:
    def fail(unet: Any, args: Any, kwargs: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    hook = model._main.unet.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.anyio
async def test_another_tenant_does_not_wait_for_the_end_of_an_image(
    catalog: Catalog, tiny_folder: Path
) -> None:
    entry = with_room(catalog, 2)
    models: list[Watched] = []

    def make() -> Watched:
        models.append(Watched(entry, tiny_folder))
        return models[0]

    long = [msgspec.structs.replace(ENDLESS, seed=seed) for seed in range(3)]
    short = msgspec.structs.replace(TEXT, seed=9, steps=2)
    async with running_worker(InMemoryBroker(), entry, folder=tiny_folder, model=make) as worker:
        drawn = [
            asyncio.create_task(worker.compute(value, tenant="a", limit_s=WAIT_LIMIT_S))
            for value in long
        ]
        async with asyncio.timeout(WAIT_LIMIT_S):
            while not models or len(models[0].inside) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (first,) = await worker.compute(short, tenant="b", limit_s=WAIT_LIMIT_S)
        assert isinstance(first, ImageResult)
        assert not any(task.done() for task in drawn)
        for (result,) in await asyncio.gather(*drawn):
            assert isinstance(result, ImageResult)
    assert models[0].interrupted
    assert models[0].work == sum(map(work_of, [*long, short])), "a step was computed twice"
