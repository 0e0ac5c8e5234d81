"""Images that join others between two steps get the same pixels as if drawn on their own."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from shared.errors import BadInput, ModelFailed, PenstockError
from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.schedulers import SCHEDULER_NAMES
from shared.models.tasks import Result
from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, drawn, pixels
from workers.models.base import (
    OutOfMemory,
    PreparedImage,
    Preparer,
    ProgressReporter,
    SteppedModel,
)
from workers.models.device import Device
from workers.models.image import image_files
from workers.models.image.checking import describe_drawing
from workers.models.image.compilation import compile_parts
from workers.models.image.model import ImageModel
from workers.models.image.options import OptionCheck
from workers.models.image.vae import encode
from workers.runtime.resident_models import offload
from workers.tasks import WORKER_TASKS, preparer_for

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

OTHERS = [
    msgspec.structs.replace(TEXT, seed=5, steps=9, scheduler="euler_a", guidance_scale=3.0),
    msgspec.structs.replace(TEXT, seed=6, steps=4, scheduler="default", guidance_scale=1.0),
    msgspec.structs.replace(FROM_IMAGE, seed=7, steps=8, negative_prompt="fog"),
    msgspec.structs.replace(TEXT, seed=8, width=72, height=48, image=None),
]
"""Each differs in something that batch keys require all images in a whole batch to share."""
UNSTEADY = ("dpm2", "dpm2_a")
"""With only a few steps and strong guidance, these turn small differences into large ones.

For some seeds, plain diffusers turns a change of one ten-millionth in the latents into a difference
of 10 levels.
"""


@pytest.fixture(scope="session")
def stepped(family: TinyPipeline) -> SteppedModel:
    assert isinstance(family.model, SteppedModel)
    assert isinstance(family.model, ProgressReporter)
    return family.model


class Alone:
    """Draws each image on its own, and only once."""

    def __init__(self, draw: Callable[[ImageInput], ImageResult]) -> None:
        self._draw = draw
        self._drawn: dict[bytes, ImageResult] = {}

    def __call__(self, value: ImageInput) -> ImageResult:
        key = msgspec.json.encode(value)
        if key not in self._drawn:
            self._drawn[key] = self._draw(value)
        return self._drawn[key]


@pytest.fixture(scope="session")
def alone(family: TinyPipeline) -> Alone:
    """Draws images as whole batches of one."""
    return Alone(lambda value: drawn(family.model, family.preparer, [value])[0])


def prepared(preparer: Preparer, value: ImageInput) -> PreparedImage:
    (item,) = preparer.prepare([value])
    assert isinstance(item, PreparedImage)
    return item


def run(
    model: SteppedModel,
    preparer: Preparer,
    arrivals: Sequence[tuple[int, ImageInput]],
    drops: Mapping[int, int] | None = None,
) -> dict[int, Result | PenstockError]:
    """Admits each input before its step, drops slots before their steps, and runs until all have
    finished.
    """
    results: dict[int, Result | PenstockError] = {}
    inside: set[int] = set()
    for step in range(1000):
        for slot, (joins, value) in enumerate(arrivals):
            if joins == step:
                model.admit(slot, prepared(preparer, value))
                inside.add(slot)
        for slot, at in (drops or {}).items():
            if at == step:
                model.drop(slot)
                inside.discard(slot)
        if inside:
            ended = model.step().results
            results |= ended
            inside -= ended.keys()
        elif step >= max(joins for joins, _ in arrivals):
            return results
    raise AssertionError("the images never ended")


def test_a_step_tells_the_pixels_that_it_computes(
    stepped: SteppedModel, tiny_preparer: Preparer
) -> None:
    pixels_of = TEXT.width * TEXT.height
    stepped.admit(0, prepared(tiny_preparer, TEXT))
    assert stepped.step().work == 2 * pixels_of, "with guidance it is computed twice"
    unguided = msgspec.structs.replace(TEXT, guidance_scale=1.0)
    stepped.admit(1, prepared(tiny_preparer, unguided))
    assert stepped.step().work == 3 * pixels_of
    for slot in (0, 1):
        stepped.drop(slot)


def difference(result: Result | PenstockError, other: ImageResult) -> int:
    assert isinstance(result, ImageResult)
    assert (result.seed, result.pixel_steps) == (other.seed, other.pixel_steps)
    return int(np.abs(pixels(result) - pixels(other)).max())


@pytest.mark.parametrize("request_", [TEXT, FROM_IMAGE], ids=["text", "image"])
@pytest.mark.parametrize(
    "schedulers", [SCHEDULER_NAMES[first::3] for first in range(3)], ids=["0", "1", "2"]
)
def test_pixels_are_those_of_an_image_alone(
    family: TinyPipeline,
    stepped: SteppedModel,
    alone: Alone,
    schedulers: Sequence[str],
    request_: ImageInput,
) -> None:
    """Covers every scheduler in the batch, and images that join and leave at any time."""
    mine = [
        msgspec.structs.replace(
            request_,
            scheduler=scheduler,
            steps=5,
            guidance_scale=2.0 if scheduler in UNSTEADY else request_.guidance_scale,
        )
        for scheduler in schedulers
    ]
    arrivals = [*enumerate(mine), *((2 * step, value) for step, value in enumerate(OTHERS))]
    results = run(stepped, family.preparer, arrivals)
    for slot, (_, value) in enumerate(arrivals):
        assert difference(results[slot], alone(value)) <= 1, value


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from([name for name in SCHEDULER_NAMES if name not in UNSTEADY]),
            st.integers(1, 6),
            st.sampled_from([1.0, 2.0, 7.5]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_company_leaves_the_pixels_as_they_are(
    family: TinyPipeline,
    stepped: SteppedModel,
    alone: Alone,
    plan: list[tuple[int, str, int, float, bool]],
) -> None:
    arrivals = []
    for seed, (joins, scheduler, steps, scale, has_source) in enumerate(plan):
        value = FROM_IMAGE if has_source else TEXT
        if has_source:
            steps = max(2, steps)
        value = msgspec.structs.replace(
            value, seed=seed, scheduler=scheduler, steps=steps, guidance_scale=scale
        )
        arrivals.append((joins, value))
    results = run(stepped, family.preparer, arrivals)
    for slot, (_, value) in enumerate(arrivals):
        assert difference(results[slot], alone(value)) <= 1, value


def test_dropped_image_changes_nothing_for_the_others(
    family: TinyPipeline, stepped: SteppedModel, alone: Alone
) -> None:
    results = run(stepped, family.preparer, [(0, OTHERS[0]), (1, TEXT), (1, OTHERS[3])], {1: 4})
    assert results.keys() == {0, 2}
    for slot, value in ((0, OTHERS[0]), (2, OTHERS[3])):
        assert difference(results[slot], alone(value)) <= 1


def test_short_image_does_not_wait_for_a_long_one(
    family: TinyPipeline, stepped: SteppedModel
) -> None:
    long, short = (msgspec.structs.replace(TEXT, steps=steps) for steps in (30, 3))
    stepped.admit(0, prepared(family.preparer, long))
    stepped.step()
    stepped.admit(1, prepared(family.preparer, short))
    ended = [stepped.step().results.keys() for _ in range(3)]
    assert ended == [set(), set(), {1}]
    teller = cast(ProgressReporter, stepped)
    assert teller.progress() == {0: (4, 30)}
    image = teller.image(0)
    assert image is not None
    assert len(image.pixels) == image.width * image.height * 3
    assert teller.image(1) is None
    stepped.drop(0)


def test_image_that_can_not_be_drawn_is_refused_alone(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer
) -> None:
    model = own_model(catalog, tiny_folder)
    model._pipelines = model._pipelines.only(["text"])
    model._options = OptionCheck(model._pipelines, TEXT.guidance_scale)
    model.admit(0, prepared(tiny_preparer, TEXT))
    with pytest.raises(BadInput) as caught:
        model.admit(1, prepared(tiny_preparer, FROM_IMAGE))
    assert caught.value.field == "image"
    while not (results := model.step().results):
        pass
    assert results.keys() == {0}


def own_model(catalog: Catalog, folder: Path) -> ImageModel:
    entry = catalog.default("image")
    model = ImageModel(entry, folder, Device("cpu", threads=1, memory_fraction=1.0))
    model.setup()
    return model


def test_compiled_sizes_are_filled_up(catalog: Catalog, family: TinyPipeline, alone: Alone) -> None:
    """Without the compiler, three items are computed as two and one, or padded to four."""
    entry = catalog.default("image")
    image = entry.image.model_copy(update={"compile": "always"})
    batch = entry.batch.model_copy(update={"max_items": 4})
    entry = entry.model_copy(update={"image": image, "batch": batch})
    model = ImageModel(entry, family.folder, Device("cpu", threads=1, memory_fraction=1.0))
    model.setup()
    with torch.compiler.set_stance("force_eager"):
        model.warmup()
        rows: list[int] = []
        unet = model._main.unet
        forward = unet.forward

        def counted(**named: Any) -> Any:
            rows.append(len(named["sample"]))
            return forward(**named)

        unet.forward = counted
        values = [msgspec.structs.replace(TEXT, seed=seed, steps=3 + seed) for seed in range(3)]
        results = run(model, family.preparer, [(0, value) for value in values])
    assert set(rows) <= {2, 4, 8}, "each image has two rows"
    for slot, value in enumerate(values):
        assert difference(results[slot], alone(value)) <= 1


def test_tasks_and_schedulers_mix_without_compiling_again(
    catalog: Catalog, family: TinyPipeline, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo and its guards are real, but the C++ compiler, which takes a minute, is left out."""
    torch._dynamo.reset()
    eager = partial(compile_parts, backend="aot_eager")
    monkeypatch.setattr("workers.models.image.pipeline.compile_parts", eager)
    entry = catalog.default("image")
    image = entry.image.model_copy(update={"compile": "always", "guidance_scale": 3.0})
    batch = entry.batch.model_copy(update={"max_items": 2})
    entry = entry.model_copy(update={"image": image, "batch": batch})
    model = ImageModel(entry, family.folder, Device("cpu", threads=1, memory_fraction=1.0))
    model.setup()
    model.warmup()
    graphs = counters["stats"]["unique_graphs"]
    calls: list[int] = []
    # A compiled graph has no modules for a hook to see, so only eager calls get here.
    model._main.unet.conv_in.register_forward_hook(lambda *given: calls.append(1))
    mask = Blob("image/png", encode(np.full((64, 64, 3), 255, np.uint8)))
    guided = msgspec.structs.replace(TEXT, guidance_scale=3.0)
    from_image = msgspec.structs.replace(FROM_IMAGE, guidance_scale=3.0, steps=7)
    values = [
        guided,
        msgspec.structs.replace(guided, seed=2, scheduler="euler_a", steps=4),
        msgspec.structs.replace(from_image, seed=3, scheduler="dpmpp_2m"),
        msgspec.structs.replace(from_image, seed=4, scheduler="heun", mask=mask),
        msgspec.structs.replace(guided, seed=5, scheduler="lms", negative_prompt="fog"),
    ]
    results = run(model, family.preparer, list(enumerate(values)))
    assert graphs
    assert counters["stats"]["unique_graphs"] == graphs
    assert not calls
    for slot in (0, 1, 2, 4):
        assert difference(results[slot], alone(values[slot])) <= 1
    assert isinstance(results[3], ImageResult)


def only_rows(model: ImageModel, monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Makes the UNet run out of memory on more than `most` rows.

    Returns the row count of each call.
    """
    unet = model._main.unet
    forward, rows = type(unet).forward, list[int]()

    def small(sample: torch.Tensor, *given: Any, **named: Any) -> Any:
        rows.append(len(sample))
        if len(sample) > most:
            raise torch.OutOfMemoryError("too large")
        return forward(unet, sample, *given, **named)

    monkeypatch.setattr(unet, "forward", small)
    return rows


def test_calls_are_halved_when_memory_is_short(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No item starts over, and calls that didn't fit in memory are not retried immediately."""
    model = own_model(catalog, tiny_folder)
    rows = only_rows(model, monkeypatch, most=2)
    values = [msgspec.structs.replace(TEXT, seed=slot, steps=4) for slot in range(3)]
    for slot, value in enumerate(values):
        model.admit(slot, prepared(tiny_preparer, value))
    results: dict[int, Any] = {}
    while len(results) < len(values):
        end = model.step()
        assert not end.preempted
        results |= end.results
    assert rows == [6, 2, 4, 2, 2] + [2] * 9
    for slot in range(3):
        assert isinstance(results[slot], ImageResult)


def test_younger_images_start_over_when_one_does_not_fit(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest image already has the device to itself, so it will never have more room."""
    model = own_model(catalog, tiny_folder)
    only_rows(model, monkeypatch, most=1)
    for slot in range(3):
        model.admit(slot, prepared(tiny_preparer, msgspec.structs.replace(TEXT, seed=slot)))
    end = model.step()
    assert end.preempted == [1, 2]
    assert isinstance(end.results[0], OutOfMemory)
    assert not model.progress()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_image_that_is_not_finite_fails_alone(
    catalog: Catalog,
    tiny_folder: Path,
    tiny_preparer: Preparer,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    model = own_model(catalog, tiny_folder)
    unet = model._main.unet
    forward = unet.forward

    def spoiling(sample: torch.Tensor, *given: Any, **named: Any) -> Any:
        noise = forward(sample, *given, **named)[0].clone()
        noise[2:4] *= value
        return (noise,)

    monkeypatch.setattr(unet, "forward", spoiling)
    for slot in range(3):
        model.admit(slot, prepared(tiny_preparer, msgspec.structs.replace(TEXT, seed=slot)))
    while not (results := model.step().results):
        pass
    assert isinstance(results[0], ImageResult)
    assert isinstance(results[1], ModelFailed)
    assert results[1].message.startswith("the image has NaN or infinite values;")
    assert isinstance(results[2], ImageResult)


def test_the_file_of_a_large_image_is_made_beside_the_steps_of_others(
    catalog: Catalog,
    tiny_folder: Path,
    tiny_preparer: Preparer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = own_model(catalog, tiny_folder)
    large = msgspec.structs.replace(TEXT, width=192, height=192, steps=2)
    small = msgspec.structs.replace(TEXT, steps=60)
    has_stepped = threading.Event()

    def encode_later(pixels: np.ndarray) -> bytes:
        if len(pixels) == large.height:
            assert has_stepped.wait(WAIT_LIMIT_S)
        return encode(pixels)

    monkeypatch.setattr(image_files, "encode", encode_later)
    for slot, value in enumerate((large, small)):
        model.admit(slot, prepared(tiny_preparer, value))
    results: dict[int, Any] = {}
    while len(results) < 2:
        end = model.step()
        if end.waiting == [0]:
            has_stepped.set()
        results |= end.results
    assert list(results) == [0, 1]
    assert has_stepped.is_set()
    alone = run(model, tiny_preparer, [(0, large)])[0]
    assert isinstance(alone, ImageResult)
    assert difference(results[0], alone) <= 1


def test_a_model_that_has_drawn_moves_to_host_memory_and_back(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer
) -> None:
    """Items use stand-ins for the model's modules, and nothing is left in the modules
    themselves.
    """
    model = own_model(catalog, tiny_folder)
    model.warmup()
    before = run(model, tiny_preparer, [(0, TEXT)])[0]
    model.admit(1, prepared(tiny_preparer, TEXT))
    model.step()
    model.drop(1)
    offloaded = offload(model, room_bytes=2**40)
    assert offloaded is not None
    assert offloaded.restore() is model
    after = run(model, tiny_preparer, [(0, TEXT)])[0]
    assert isinstance(before, ImageResult)
    assert difference(after, before) == 0


class HidingPipeline(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
    """A pipeline whose denoiser can't be replaced."""

    def register_modules(self, **modules: Any) -> None:
        super().register_modules(**modules)
        self.denoisers = [modules["unet"]]

    @wraps(diffusers.StableDiffusionPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(self, "unet", self.denoisers[0])
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("StableDiffusionPAGPipeline", "the pipeline changes shared modules while it draws"),
        ("HidingPipeline", "the pipeline doesn't call its denoiser as one of its parts"),
    ],
)
def test_some_pipelines_draw_one_image_at_a_time(
    catalog: Catalog,
    tiny_folder: Path,
    tiny_preparer: Preparer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: str,
    reason: str,
) -> None:
    """Perturbed attention sets processors and restores them when an image is finished."""
    monkeypatch.setattr(diffusers, "HidingPipeline", HidingPipeline, raising=False)
    for part in tiny_folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    index = json.loads((tiny_folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").unlink()
    name = {"_class_name": pipeline}
    (tmp_path / "model_index.json").write_text(json.dumps(index | name))
    model = own_model(catalog, tmp_path)
    assert not model.runs_alone
    model.warmup()
    assert model.runs_alone == reason
    assert f"images are drawn one at a time, because {reason}" in describe_drawing(model)
    values = [msgspec.structs.replace(TEXT, seed=seed, steps=3) for seed in range(3)]
    alone = [run(model, tiny_preparer, [(0, value)])[0] for value in values]
    for slot, value in enumerate(values):
        model.admit(slot, prepared(tiny_preparer, value))
    end = model.step()
    assert end.waiting == [1, 2]
    model.drop(1)
    results: dict[int, Any] = end.results
    while len(results) < 2:
        results |= model.step().results
    for slot in (0, 2):
        expected = alone[slot]
        assert isinstance(expected, ImageResult)
        assert difference(results[slot], expected) == 0


@pytest.mark.parametrize(
    ("join", "pipeline", "joins"),
    [
        ("auto", "StableDiffusionPipeline", True),
        ("never", "StableDiffusionPipeline", False),
        ("auto", "StableDiffusionXLPipeline", True),
        ("auto", "StableDiffusionXLImg2ImgPipeline", True),
        ("never", "StableDiffusionXLPipeline", False),
        ("auto", "StableDiffusion3Pipeline", True),
        ("auto", "PixArtSigmaPipeline", True),
        ("auto", None, False),
    ],
)
def test_catalog_and_pipeline_decide_who_joins(
    catalog: Catalog, tmp_path: Path, join: str, pipeline: str | None, joins: bool
) -> None:
    if pipeline is not None:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    entry = catalog.default("image")
    entry = entry.model_copy(update={"image": entry.image.model_copy(update={"join": join})})
    assert WORKER_TASKS["image"].computes_steps(entry, tmp_path) == joins
    items = preparer_for(entry, tmp_path).prepare([TEXT, msgspec.structs.replace(TEXT, steps=3)])
    keys = {item.key for item in items if isinstance(item, PreparedImage)}
    assert len(keys) == (1 if joins else 2)


@pytest.mark.parametrize("text", ["", "[]", '{"_class_name": 1}', "\u0000"])
def test_folder_without_an_index_joins_nothing(catalog: Catalog, tmp_path: Path, text: str) -> None:
    (tmp_path / "model_index.json").write_text(text)
    assert not WORKER_TASKS["image"].computes_steps(catalog.default("image"), tmp_path)
