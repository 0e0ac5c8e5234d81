"""Features that only Stable Diffusion XL has, in whole batches and in batches that items join.

test_image_drawing.py compares its pixels with plain diffusers, and test_image_steps.py tests that
other images in the batch have no effect.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from shared.errors import BadInput
from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_drawing import drawn, joining, reference
from tests.workers.models.tiny_xl import write_folder
from workers.models.base import OutOfMemory, PreparedImage
from workers.models.device import Device
from workers.models.image.model import ImageModel
from workers.models.image.schedulers import Schedulers
from workers.tasks import preparer_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    # Stable Diffusion XL's pipelines call it themselves, to decode in fp32.
    pytest.mark.filterwarnings("ignore:.upcast_vae.:FutureWarning"),
]

OWN = msgspec.structs.replace(TEXT, scheduler="default", steps=4)
OWN_FROM_IMAGE = msgspec.structs.replace(FROM_IMAGE, scheduler="default", steps=4)


def loaded(catalog: Catalog, folder: Path, precision: str = "fp32") -> TinyPipeline:
    entry = catalog.default("image").model_copy(update={"precision": precision})
    model = ImageModel(entry, folder, Device("cpu", threads=1, memory_fraction=1.0))
    model.setup()
    return TinyPipeline(folder, preparer_for(entry, folder), model)


def both_ways(tiny: TinyPipeline, *values: ImageInput) -> list[np.ndarray]:
    """The images in a whole batch. Asserts that the images are the same if they join one by one."""
    whole = [pixels(result) for result in drawn(tiny.model, tiny.preparer, values)]
    joined = [pixels(result) for result in joining(tiny.model, tiny.preparer, values)]
    for one, other in zip(whole, joined, strict=True):
        assert np.abs(one - other).max() <= 1
    return whole


def assert_as_plain_diffusers(tiny: TinyPipeline, *values: ImageInput) -> None:
    for mine, other in zip(both_ways(tiny, *values), reference(tiny.folder, values), strict=True):
        assert np.abs(mine - other).max() <= 1


def test_guidance_of_a_distilled_model_is_plain_diffusers(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    """The UNet gets each item's scale as an input and computes one row per item."""
    tiny = loaded(catalog, write_folder(tmp_path, tiny_folder, distilled=True))
    assert_as_plain_diffusers(tiny, OWN_FROM_IMAGE)
    values = [OWN, msgspec.structs.replace(OWN, guidance_scale=90.0)]
    together = [pixels(result) for result in joining(tiny.model, tiny.preparer, values)]
    for image, other in zip(together, reference(tiny.folder, values), strict=True):
        assert np.abs(image - other).max() <= 1
    assert np.abs(together[0] - together[1]).max() > 1


def test_no_negative_prompt_is_zeros_or_an_empty_text_as_the_folder_says(
    tiny_xl: TinyPipeline, catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, tiny_folder, force_zeros_for_empty_prompt=False)
    texts = loaded(catalog, folder)
    assert_as_plain_diffusers(texts, OWN)
    assert_as_plain_diffusers(tiny_xl, OWN)
    assert np.abs(both_ways(texts, OWN)[0] - both_ways(tiny_xl, OWN)[0]).max() > 8
    fog = msgspec.structs.replace(OWN, negative_prompt="fog")
    assert np.abs(both_ways(texts, fog)[0] - both_ways(tiny_xl, fog)[0]).max() == 0


def test_equal_timesteps_at_the_start_are_counted_as_by_the_pipeline(
    catalog: Catalog, tiny_xl_folder: Path
) -> None:
    """A scheduler that searches for its first timestep, rather than counting, picks the second."""
    tiny = loaded(catalog, tiny_xl_folder)
    assert isinstance(tiny.model, ImageModel)
    scheduler = diffusers.EulerDiscreteScheduler(num_train_timesteps=3, timestep_spacing="leading")
    tiny.model._schedulers = Schedulers(scheduler)
    scheduler.set_timesteps(OWN.steps)
    assert scheduler.timesteps.tolist() == [0.0] * OWN.steps
    both_ways(tiny, OWN)


def test_refiner_draws_from_an_image_as_plain_diffusers_and_refuses_texts(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    """The refiner takes scores instead of a size and has one text encoder."""
    folder = write_folder(tmp_path, tiny_folder, refines=True)
    refiner = loaded(catalog, folder)
    refiner.model.warmup()
    assert_as_plain_diffusers(refiner, OWN_FROM_IMAGE)
    (item,) = refiner.preparer.prepare([OWN])
    assert isinstance(item, PreparedImage)
    (refused,) = refiner.model.predict([item], lambda step, steps: None)
    assert isinstance(refused, BadInput)
    assert refused.field == "image"
    long = msgspec.structs.replace(OWN_FROM_IMAGE, prompt="a " * 40)
    (result,) = drawn(refiner.model, refiner.preparer, [long])
    assert result.truncated_tokens == 14


def test_statistics_of_the_latents_are_those_of_the_vae(
    catalog: Catalog, tiny_folder: Path, tmp_path: Path
) -> None:
    tiny = loaded(catalog, write_folder(tmp_path, tiny_folder, means=True))
    assert_as_plain_diffusers(tiny, OWN)
    assert_as_plain_diffusers(tiny, OWN_FROM_IMAGE)
    (whole,) = both_ways(tiny, OWN)
    assert np.abs(last_preview(tiny) - whole).mean() < whole.std() / 4


def last_preview(tiny: TinyPipeline) -> np.ndarray:
    """The preview of OWN before its last step."""
    model = tiny.model
    assert isinstance(model, ImageModel)
    (item,) = tiny.preparer.prepare([OWN])
    model.admit(0, item)  # type: ignore[arg-type]
    for _ in range(OWN.steps - 1):
        model.step()
    image = model.image(0)
    model.drop(0)
    assert image is not None
    shape = (image.height, image.width, 3)
    return np.frombuffer(image.pixels, np.uint8).reshape(shape).astype(int)


@pytest.fixture(scope="module")
def overflowing(
    catalog: Catalog, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> TinyPipeline:
    """A pipeline in fp16 whose VAE overflows, like Stable Diffusion XL's VAE."""
    folder = write_folder(tmp_path_factory.mktemp("fp16"), tiny_folder, overflows=True)
    return loaded(catalog, folder, "fp16")


def test_vae_that_overflows_in_fp16_computes_in_fp32(
    overflowing: TinyPipeline, tiny_xl: TinyPipeline
) -> None:
    for value in (OWN, OWN_FROM_IMAGE):
        (mine,), (exact,) = both_ways(overflowing, value), both_ways(tiny_xl, value)
        assert np.abs(mine - exact).mean() < 8
    assert last_preview(overflowing).std() > 8


@pytest.mark.parametrize("part", ["_encode", "_decode"])
@pytest.mark.parametrize("draw", [drawn, joining], ids=["whole", "joining"])
def test_vae_has_its_type_back_where_memory_ran_out(
    overflowing: TinyPipeline,
    part: str,
    draw: Callable[..., list[ImageResult]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pipelines temporarily convert the VAE to fp32, and leave it that way if they fail."""
    (expected,) = drawn(overflowing.model, overflowing.preparer, [OWN])
    model = overflowing.model
    assert isinstance(model, ImageModel)

    def refuse(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(AutoencoderKL, part, refuse)
        with pytest.raises(OutOfMemory):
            draw(model, overflowing.preparer, [OWN_FROM_IMAGE])
    (after,) = draw(model, overflowing.preparer, [OWN])
    assert np.abs(pixels(after) - pixels(expected)).max() <= 1


def test_images_get_no_watermark(
    tiny_xl_folder: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers adds a watermark if a watermarking package happens to be installed."""

    class Watermark:
        def apply_watermark(self, images: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(images)

    package = diffusers.pipelines.stable_diffusion_xl
    for module in (
        package.pipeline_stable_diffusion_xl,
        package.pipeline_stable_diffusion_xl_img2img,
    ):
        monkeypatch.setattr(module, "is_invisible_watermark_available", lambda: True)
        monkeypatch.setattr(module, "StableDiffusionXLWatermarker", Watermark, raising=False)
    tiny = loaded(catalog, tiny_xl_folder)
    for value in (OWN, OWN_FROM_IMAGE):
        assert both_ways(tiny, value)[0].std() > 8


@pytest.mark.parametrize(
    "name",
    [
        f"StableDiffusion{kind}{way}Pipeline"
        for kind in ("", "XL")
        for way in ("", "Img2Img", "Inpaint")
    ],
)
def test_every_class_that_joins_is_of_a_family(
    catalog: Catalog, tiny_folder: Path, tiny_xl_folder: Path, tmp_path: Path, name: str
) -> None:
    """Images use the class named in the folder's file, and that class's pipeline for images."""
    source = tiny_xl_folder if "XL" in name else tiny_folder
    for part in source.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "model_index.json").unlink()
    index = json.loads((source / "model_index.json").read_text()) | {"_class_name": name}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert both_ways(loaded(catalog, tmp_path), OWN, msgspec.structs.replace(OWN, seed=2))
