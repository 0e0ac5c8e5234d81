"""Masks: the area outside stays bit-identical, and the area inside matches diffusers."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
    UNet2DConditionModel,
)
from PIL import Image

from models.shapes.draw import draw
from models.shapes.masked import REDRAWN_MIN, STRENGTH, redrawings, shows
from shared.errors import BadInput
from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.schedulers import SCHEDULER_NAMES
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.plain_diffusers import plain_pipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_steps import (
    OTHERS,
    UNSTEADY,
    Alone,
    difference,
    prepared,
    run,
)
from workers.models.base import Preparer, SteppedModel
from workers.models.image.model import ImageModel
from workers.tasks import preparer_for

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]


def as_png(image: Image.Image) -> Blob:
    data = io.BytesIO()
    image.save(data, "PNG")
    return Blob("image/png", data.getvalue())


def box(left: int, top: int, right: int, bottom: int, value: int = 255) -> Image.Image:
    """A mask that selects a rectangle."""
    mask = Image.new("L", (64, 64))
    mask.paste(value, (left, top, right, bottom))
    return mask


BOX = box(19, 8, 50, 41)
MASKED = msgspec.structs.replace(FROM_IMAGE, mask=as_png(BOX), strength=1.0)


def source_pixels(value: ImageInput) -> np.ndarray:
    assert value.image is not None
    with Image.open(io.BytesIO(value.image.data or b"")) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def result_alone(model: SteppedModel, preparer: Preparer, value: ImageInput) -> ImageResult:
    result = run(model, preparer, [(0, value)])[0]
    assert isinstance(result, ImageResult), result
    return result


def drawn_alone(model: SteppedModel, preparer: Preparer, value: ImageInput) -> np.ndarray:
    return pixels(result_alone(model, preparer, value))


@pytest.fixture(scope="session")
def stepped(family: TinyPipeline) -> SteppedModel:
    assert isinstance(family.model, SteppedModel)
    return family.model


@pytest.fixture(scope="session")
def alone(family: TinyPipeline, stepped: SteppedModel) -> Alone:
    """Draws images step by step. Masks are not supported when a whole batch is drawn at once."""
    return Alone(lambda value: result_alone(stepped, family.preparer, value))


@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_outside_of_the_mask_are_the_pixels_of_the_source(
    family: TinyPipeline, stepped: SteppedModel, strength: float
) -> None:
    value = msgspec.structs.replace(MASKED, strength=strength)
    image, source = drawn_alone(stepped, family.preparer, value), source_pixels(value)
    inside = np.asarray(BOX) > 0
    assert np.array_equal(image[~inside], source[~inside])
    assert np.abs(image[inside] - source[inside]).mean() > 8
    other = drawn_alone(stepped, family.preparer, msgspec.structs.replace(value, seed=9))
    assert np.abs(image[inside] - other[inside]).max() > 8


def test_gray_mixes_source_and_drawing(family: TinyPipeline, stepped: SteppedModel) -> None:
    gray = msgspec.structs.replace(MASKED, mask=as_png(box(19, 8, 50, 41, value=51)))
    whole, mixed, source = (
        drawn_alone(stepped, family.preparer, MASKED),
        drawn_alone(stepped, family.preparer, gray),
        source_pixels(gray),
    )
    assert np.abs(mixed - (0.2 * whole + 0.8 * source))[8:41, 19:50].max() < 0.51
    assert np.array_equal(mixed[41:], source[41:])


@pytest.mark.parametrize("schedulers", [SCHEDULER_NAMES[first::3] for first in range(3)], ids=str)
def test_masked_and_unmasked_images_are_drawn_together_as_alone(
    family: TinyPipeline, stepped: SteppedModel, alone: Alone, schedulers: list[str]
) -> None:
    """Covers every scheduler in the batch, and images that join and leave at any time."""
    masked = [
        msgspec.structs.replace(
            MASKED,
            seed=seed,
            scheduler=name,
            steps=5,
            strength=1.0 if seed % 2 else 0.6,
            guidance_scale=2.0 if name in UNSTEADY else 7.5,
            mask=as_png(box(seed, 8, 40, 30 + seed)),
        )
        for seed, name in enumerate(schedulers)
    ]
    arrivals = [*enumerate(masked), *((2 * step, value) for step, value in enumerate(OTHERS))]
    results = run(stepped, family.preparer, arrivals)
    for slot, (_, value) in enumerate(arrivals):
        assert difference(results[slot], alone(value)) <= 1, value


def write_tiny(folder: Path, shipped: Path, *, xl: bool, trained: bool) -> Path:
    """Writes a pipeline with random weights and a four-channel VAE, like those on the Hub."""
    from tests.workers.models import tiny_xl

    parts: dict[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    kind: Any = StableDiffusionXLInpaintPipeline if xl else StableDiffusionInpaintPipeline
    whole = shipped
    if xl:
        whole, parts = tiny_xl.write_folder(folder, shipped, means=True), {"add_watermarker": False}
    torch.manual_seed(5)
    if not xl:
        config = AutoencoderKL.load_config(shipped / "vae") | {"latent_channels": 4}
        parts["vae"] = AutoencoderKL.from_config(config)
        parts["vae"].decoder.conv_out.weight.data *= 20
    config = UNet2DConditionModel.load_config(whole / "unet")
    channels = {"in_channels": 9 if trained else 4, "out_channels": 4}
    parts["unet"] = UNet2DConditionModel.from_config(config | channels)
    kind.from_pretrained(whole, local_files_only=True, **parts).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[(False, False), (False, True), (True, False), (True, True)])
def random_tiny(
    request: pytest.FixtureRequest,
    catalog: Catalog,
    tiny_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> TinyPipeline:
    """A pipeline with random weights for each family, with and without a UNet trained with
    masks.
    """
    xl, trained = request.param
    folder = write_tiny(tmp_path_factory.mktemp("masks"), tiny_folder, xl=xl, trained=trained)
    model = model_for(catalog.default("image"), folder, "cpu")
    model.setup()
    return TinyPipeline(folder, preparer_for(catalog.default("image"), folder), model)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("scheduler", ["ddim", "euler", "dpmpp_2m", "heun"])
def test_inside_of_the_mask_are_the_pixels_of_plain_diffusers(
    random_tiny: TinyPipeline, scheduler: str, strength: float
) -> None:
    """The mask is aligned with the latents' grid, so diffusers handles it the same way."""
    folder, preparer, model = random_tiny
    assert isinstance(model, ImageModel)
    mask = box(16, 8, 48, 40)
    value = msgspec.structs.replace(
        MASKED, mask=as_png(mask), scheduler=scheduler, strength=strength, guidance_scale=3.0
    )
    ours = drawn_alone(model, preparer, value)
    is_xl = (folder / "text_encoder_2").is_dir()
    kind: Any = StableDiffusionXLInpaintPipeline if is_xl else StableDiffusionInpaintPipeline
    plain = plain_pipeline(kind, folder)
    plain.scheduler = model._schedulers.create(scheduler)
    assert value.image is not None
    drawn = plain(
        value.prompt,
        image=Image.open(io.BytesIO(value.image.data or b"")),
        mask_image=mask,
        width=64,
        height=64,
        strength=strength,
        num_inference_steps=value.steps,
        guidance_scale=value.guidance_scale,
        generator=torch.Generator().manual_seed(value.seed),
    ).images[0]
    difference = np.abs(ours - np.asarray(drawn).astype(int))[8:40, 16:48]
    assert difference.max() <= 1


@pytest.fixture(scope="module")
def trained_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("nine"), tiny_folder, xl=False, trained=True)


def test_a_model_trained_with_masks_warms_up_and_draws_nothing_else(
    catalog: Catalog, trained_folder: Path
) -> None:
    model = model_for(catalog.default("image"), trained_folder, "cpu")
    model.setup()
    model.warmup()
    preparer = preparer_for(catalog.default("image"), trained_folder)
    assert isinstance(model, SteppedModel)
    for value in (TEXT, FROM_IMAGE):
        with pytest.raises(BadInput, match="within the mask") as caught:
            model.admit(0, prepared(preparer, value))
        assert caught.value.field == "mask"
    assert drawn_alone(model, preparer, MASKED).shape == (64, 64, 3)


def test_whole_batches_have_masks(tiny: SteppedModel, tiny_preparer: Preparer) -> None:
    assert isinstance(tiny, ImageModel)
    (whole,) = tiny.predict([prepared(tiny_preparer, MASKED)], lambda step, steps: None)
    assert isinstance(whole, ImageResult)
    assert np.array_equal(pixels(whole), drawn_alone(tiny, tiny_preparer, MASKED))


SCENES = 96
AT_ONCE = 12


def test_a_masked_figure_is_redrawn_as_told(
    catalog: Catalog, tiny: SteppedModel, tiny_preparer: Preparer
) -> None:
    """Measured by the judge, on held-out scenes with one and two figures, the first of which is
    masked.
    """
    usual = catalog.default("image").image
    asked = [
        (
            msgspec.structs.replace(
                MASKED,
                prompt=one.caption,
                steps=usual.steps,
                guidance_scale=usual.guidance_scale,
                scheduler=usual.scheduler,
                strength=STRENGTH,
                seed=one.seed,
                image=as_png(draw(one.before)),
                mask=as_png(one.mask),
            ),
            one.after,
        )
        for one in redrawings(SCENES)
    ]
    right = unchanged = 0
    for at in range(0, SCENES, AT_ONCE):
        some = asked[at : at + AT_ONCE]
        results = run(tiny, tiny_preparer, [(0, value) for value, _ in some])
        for slot, (value, after) in enumerate(some):
            result = results[slot]
            assert isinstance(result, ImageResult)
            image = pixels(result)
            outside = mask_pixels(value) == 0
            unchanged += np.array_equal(image[outside], source_pixels(value)[outside])
            right += shows(image.astype(np.uint8), after)
    assert unchanged == SCENES
    assert right / SCENES >= REDRAWN_MIN, f"{right} of {SCENES} redrawn as told"


def mask_pixels(value: ImageInput) -> np.ndarray:
    assert value.mask is not None
    return np.asarray(Image.open(io.BytesIO(value.mask.data or b"")))
