import io
import json
import shutil
from collections.abc import Sequence
from functools import wraps
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from shared.errors import BadInput, ConfigurationError, ModelFailed
from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.schedulers import SCHEDULER_NAMES, SCHEDULERS
from shared.models.tasks import Input
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.batches import model_for
from workers.models.base import InferenceModel, PreparedImage, Preparer
from workers.models.device import Device
from workers.models.image.model import ImageModel

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")]

TEXT = ImageInput(
    prompt="a mill by the river",
    width=64,
    height=64,
    steps=6,
    guidance_scale=7.5,
    seed=1,
    scheduler="ddim",
)


def png(width: int, height: int) -> Blob:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return Blob("image/png", encoded.getvalue())


FROM_IMAGE = msgspec.structs.replace(TEXT, image=png(64, 64), strength=0.6)


def drawn(model: InferenceModel, preparer: Preparer, inputs: Sequence[Input]) -> list[ImageResult]:
    batch = [item for item in preparer.prepare(inputs) if isinstance(item, PreparedImage)]
    assert len(batch) == len(inputs)
    assert len({item.key for item in batch}) == 1
    assert model.groups(batch) == [list(range(len(batch)))]
    results = [
        result
        for result in model.predict(batch, lambda step, steps: None)
        if isinstance(result, ImageResult)
    ]
    assert len(results) == len(inputs)
    return results


def pixels(result: ImageResult) -> np.ndarray:
    assert result.image.media_type == "image/png"
    with Image.open(io.BytesIO(result.image.data or b""), formats=["PNG"]) as image:
        assert image.size == (result.width, result.height)
        return np.asarray(image).astype(int)


PROMPTS = ("a mill", "", "a long prompt about a river " * 9)
PAIRS = tuple(combinations(PROMPTS, 2))


@pytest.mark.parametrize("request_", [TEXT, FROM_IMAGE], ids=["text", "image"])
@pytest.mark.parametrize(
    ("scheduler", "prompts"),
    [(name, PAIRS[at % len(PAIRS)]) for at, name in enumerate(SCHEDULER_NAMES)],
    ids=SCHEDULER_NAMES,
)
def test_a_job_gives_the_same_pixels_alone_or_in_a_batch(
    tiny: InferenceModel,
    tiny_preparer: Preparer,
    scheduler: str,
    prompts: Sequence[str],
    request_: ImageInput,
) -> None:
    """Tests every pair of prompts, because the neighbor could matter but the number of neighbors
    does not.
    """
    inputs = [
        msgspec.structs.replace(request_, scheduler=scheduler, seed=seed, prompt=prompt)
        for seed, prompt in enumerate(prompts)
    ]
    together = [pixels(result) for result in drawn(tiny, tiny_preparer, inputs)]
    alone = [pixels(drawn(tiny, tiny_preparer, [value])[0]) for value in inputs]
    assert max(np.abs(one - other).max() for one, other in zip(together, alone, strict=True)) <= 1
    assert np.abs(together[0] - together[1]).max() > 8


@pytest.mark.parametrize("name", ["dpm2", "euler_a"])
def test_a_scheduler_is_made_once(
    catalog: Catalog, tiny_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating dpm2's scheduler takes half a second.

    Each image gets a copy that has not been used yet.
    """
    made: list[str] = []
    kind = getattr(diffusers, SCHEDULERS[name].class_name)
    usual = kind.__init__

    @wraps(usual)
    def counted(scheduler: Any, *given: Any, **named: Any) -> None:
        made.append(name)
        usual(scheduler, *given, **named)

    model = ImageModel(
        catalog.default("image"), tiny_folder, Device("cpu", threads=1, memory_fraction=1.0)
    )
    model.setup()
    monkeypatch.setattr(kind, "__init__", counted)
    first, second = (model._schedulers.create(name) for _ in range(2))
    assert made == [name]
    first.set_timesteps(4)
    assert len(second.timesteps) > len(first.timesteps)


def test_schedulers_differ(tiny: InferenceModel, tiny_preparer: Preparer) -> None:
    """Schedulers that add noise deviate from the plain ones; the same scheduler repeats its
    result.
    """
    by_name = {
        name: pixels(drawn(tiny, tiny_preparer, [msgspec.structs.replace(TEXT, scheduler=name)])[0])
        for name in ("ddim", "euler_a", "lcm", "default")
    }
    assert np.abs(by_name["ddim"] - by_name["default"]).max() == 0
    assert np.abs(by_name["ddim"] - by_name["euler_a"]).max() > 8
    assert np.abs(by_name["lcm"] - by_name["euler_a"]).max() > 8


def test_every_parameter_counts(tiny: InferenceModel, tiny_preparer: Preparer) -> None:
    base = pixels(drawn(tiny, tiny_preparer, [TEXT])[0])
    for change in (
        {"seed": 2},
        {"prompt": "other"},
        {"negative_prompt": "x"},
        {"guidance_scale": 1.0},
        {"steps": 3},
    ):
        other = pixels(drawn(tiny, tiny_preparer, [msgspec.structs.replace(TEXT, **change)])[0])
        assert np.abs(base - other).max() > 0, change


def test_the_source_image_counts_and_is_fitted_to_the_size(
    tiny: InferenceModel, tiny_preparer: Preparer
) -> None:
    small = msgspec.structs.replace(FROM_IMAGE, image=png(30, 50), width=72, height=48)
    result = drawn(tiny, tiny_preparer, [small])[0]
    assert pixels(result).shape == (48, 72, 3)
    other = msgspec.structs.replace(small, image=png(31, 50))
    assert np.abs(pixels(result) - pixels(drawn(tiny, tiny_preparer, [other])[0])).max() > 0


@pytest.mark.parametrize(("value", "steps"), [(TEXT, 6), (FROM_IMAGE, 3)], ids=["text", "image"])
def test_steps_are_told_and_paid_for(
    tiny: InferenceModel, tiny_preparer: Preparer, value: ImageInput, steps: int
) -> None:
    told: list[tuple[int, int]] = []
    (item,) = tiny_preparer.prepare([value])
    assert isinstance(item, PreparedImage)
    (result,) = tiny.predict([item], lambda step, steps: told.append((step, steps)))
    assert told == [(step, steps) for step in range(1, steps + 1)]
    assert isinstance(result, ImageResult)
    assert (result.seed, result.width, result.height) == (value.seed, 64, 64)
    assert result.pixel_steps == item.length == 64 * 64 * steps


def test_a_model_with_a_scheduler_of_its_own_takes_no_other(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer, tmp_path: Path
) -> None:
    folder = tmp_path / "flow"
    shutil.copytree(tiny_folder, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    model = model_for(catalog.default("image"), folder, "cpu")
    model.setup()
    (item,) = tiny_preparer.prepare([TEXT])
    assert isinstance(item, PreparedImage)
    (error,) = model.predict([item], lambda step, steps: None)
    assert isinstance(error, BadInput)
    assert error.field == "scheduler"


def test_an_image_of_nan_fails(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer, tmp_path: Path
) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "vae" / "diffusion_pytorch_model.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in weights.items()},
        folder / "vae" / "diffusion_pytorch_model.safetensors",
    )
    model = model_for(catalog.default("image"), folder, "cpu")
    model.setup()
    (item,) = tiny_preparer.prepare([TEXT])
    assert isinstance(item, PreparedImage)
    assert isinstance(model.predict([item], lambda step, steps: None)[0], ModelFailed)


def test_a_folder_without_a_pipeline_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model_index\.json"):
        model_for(catalog.default("image"), tmp_path, "cpu").setup()
