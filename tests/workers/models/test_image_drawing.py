"""Images (sizes, memory, prompts, sources), compared with plain diffusers on the same weights."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import CLIPTextModel

from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.tasks import Input
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.plain_diffusers import plain_pipeline
from workers.models.base import InferenceModel, OutOfMemory, PreparedImage, Preparer, SteppedModel
from workers.models.device import Device
from workers.models.image.model import ImageModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    # Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

XL = (diffusers.StableDiffusionXLPipeline, diffusers.StableDiffusionXLImg2ImgPipeline)
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
    shades = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(shades).save(encoded, "PNG")
    return Blob("image/png", encoded.getvalue())


FROM_IMAGE = msgspec.structs.replace(TEXT, image=png(64, 64), strength=0.6)


def drawn(model: InferenceModel, preparer: Preparer, inputs: Sequence[Input]) -> list[ImageResult]:
    batch = [item for item in preparer.prepare(inputs) if isinstance(item, PreparedImage)]
    results = [
        result
        for result in model.predict(batch, lambda step, steps: None)
        if isinstance(result, ImageResult)
    ]
    assert len(results) == len(inputs)
    return results


def pixels(result: ImageResult) -> np.ndarray:
    with Image.open(io.BytesIO(result.image.data or b""), formats=["PNG"]) as image:
        return np.asarray(image).astype(int)


def reference(folder: Path, inputs: Sequence[ImageInput]) -> list[np.ndarray]:
    """Images drawn by plain diffusers, one at a time."""
    kind = (
        diffusers.AutoPipelineForText2Image
        if inputs[0].image is None
        else diffusers.AutoPipelineForImage2Image
    )
    images = []
    for value in inputs:
        pipeline = plain_pipeline(kind, folder)
        sizes = {}
        if isinstance(pipeline, XL):
            # The conditioning for an uncropped training image of this size.
            size = (value.height, value.width)
            sizes = {"original_size": size, "target_size": size, "crops_coords_top_left": (0, 0)}
        source = {}
        if value.image is not None:
            with Image.open(io.BytesIO(value.image.data or b"")) as opened:
                source = {"image": opened.convert("RGB"), "strength": value.strength}
        options = {
            name: getattr(value, name)
            for name in ("clip_skip", "guidance_rescale")
            if getattr(value, name)
        }
        drawn = pipeline(
            value.prompt,
            negative_prompt=value.negative_prompt or None,
            num_inference_steps=value.steps,
            guidance_scale=value.guidance_scale,
            generator=torch.Generator().manual_seed(value.seed),
            **(source or {"width": value.width, "height": value.height}),
            **sizes,
            **options,
        ).images[0]
        images.append(np.asarray(drawn).astype(int))
    return images


@pytest.mark.parametrize("request_", [TEXT, FROM_IMAGE], ids=["text", "image"])
@pytest.mark.parametrize(
    "change",
    [{}, {"negative_prompt": "fog"}, {"guidance_scale": 1.0}, {"width": 96, "height": 56}],
    ids=str,
)
def test_the_pixels_are_those_of_plain_diffusers(
    family: TinyPipeline, request_: ImageInput, change: dict[str, Any]
) -> None:
    """The images are drawn as one batch, and in a batch that they join one by one."""
    value = msgspec.structs.replace(request_, scheduler="default", **change)
    if value.image is not None:
        value.image = png(value.width, value.height)
    inputs = [msgspec.structs.replace(value, seed=seed) for seed in (1, 2)]
    whole = [pixels(result) for result in drawn(family.model, family.preparer, inputs)]
    joined = [pixels(result) for result in joining(family.model, family.preparer, inputs)]
    expected = reference(family.folder, inputs)
    for ours in (whole, joined):
        for mine, other in zip(ours, expected, strict=True):
            assert np.abs(mine - other).max() <= 1


def without_last_layer(folder: Path, value: ImageInput) -> np.ndarray:
    """Plain Stable Diffusion's image for a prompt that CLIP encoded without its last layer."""
    whole = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    whole.set_progress_bar_config(disable=True)
    parts = dict(whole.components)
    layers = whole.text_encoder.config.num_hidden_layers
    parts["text_encoder"] = CLIPTextModel.from_pretrained(
        folder / "text_encoder", num_hidden_layers=layers - 1
    )
    short = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    drawn = whole(
        prompt_embeds=short.encode_prompt(value.prompt, "cpu", 1, False)[0],
        negative_prompt_embeds=whole.encode_prompt("", "cpu", 1, False)[0],
        num_inference_steps=value.steps,
        guidance_scale=value.guidance_scale,
        generator=torch.Generator().manual_seed(value.seed),
        width=value.width,
        height=value.height,
    ).images[0]
    return np.asarray(drawn).astype(int)


@pytest.mark.parametrize("change", [{"clip_skip": 1}, {"guidance_rescale": 0.7}], ids=str)
def test_options_are_those_of_plain_diffusers(family: TinyPipeline, change: dict[str, Any]) -> None:
    """Draws one image with the options and one without them in the same batch."""
    usual = msgspec.structs.replace(TEXT, scheduler="default")
    value = msgspec.structs.replace(usual, **change)
    (whole,) = drawn(family.model, family.preparer, [value])
    mine, plain = joining(family.model, family.preparer, [value, usual])
    is_xl = (family.folder / "text_encoder_2").is_dir()
    # diffusers 0.42 does not find CLIP's norm in transformers 5 here.
    expected = (
        without_last_layer(family.folder, value)
        if value.clip_skip and not is_xl
        else reference(family.folder, [value])[0]
    )
    for ours in (whole, mine):
        assert np.abs(pixels(ours) - expected).max() <= 1
    assert np.abs(pixels(mine) - pixels(plain)).max() > 1


def test_guidance_is_rescaled_with_an_image_too(family: TinyPipeline) -> None:
    """Not every diffusers pipeline does so."""
    value = msgspec.structs.replace(FROM_IMAGE, scheduler="default", guidance_rescale=0.7)
    without = msgspec.structs.replace(value, guidance_rescale=0.0)
    mine, plain = joining(family.model, family.preparer, [value, without])
    assert np.abs(pixels(mine) - pixels(plain)).max() > 1
    (item,) = family.preparer.prepare([value])
    assert isinstance(item, PreparedImage)
    (result,) = family.model.predict([item], lambda step, steps: None)
    assert isinstance(result, ImageResult)
    assert np.abs(pixels(result) - pixels(mine)).max() <= 1


def joining(
    model: InferenceModel, preparer: Preparer, inputs: Sequence[Input]
) -> list[ImageResult]:
    """Draws the inputs in one batch. One more input joins before each step."""
    assert isinstance(model, SteppedModel)
    results: dict[int, Any] = {}
    waiting = list(enumerate(preparer.prepare(inputs)))
    while len(results) < len(inputs):
        if waiting:
            index, item = waiting.pop(0)
            assert isinstance(item, PreparedImage)
            model.admit(index, item)
        results |= model.step().results
    for result in results.values():
        if isinstance(result, OutOfMemory):
            raise result
    return [results[index] for index in range(len(inputs))]


@pytest.fixture(scope="module")
def in_sizes(catalog: Catalog, tiny_folder: Path) -> ImageModel:
    """A model planned for batches of 1, 2 and 4, without the compiler (see test_compiled.py)."""
    entry = catalog.default("image")
    image = entry.image.model_copy(update={"compile": "always"})
    batch = entry.batch.model_copy(update={"max_items": 4})
    device = Device("cpu", threads=1, memory_fraction=1.0)
    model = ImageModel(
        entry.model_copy(update={"image": image, "batch": batch}), tiny_folder, device
    )
    model.setup()
    with torch.compiler.set_stance("force_eager"):
        model.warmup()
    return model


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("request_", [TEXT, FROM_IMAGE], ids=["text", "image"])
def test_batches_in_fixed_sizes_draw_the_same(
    tiny: InferenceModel,
    in_sizes: ImageModel,
    tiny_preparer: Preparer,
    request_: ImageInput,
    count: int,
) -> None:
    inputs = [msgspec.structs.replace(request_, seed=seed) for seed in range(count)]
    batch = [item for item in tiny_preparer.prepare(inputs) if isinstance(item, PreparedImage)]
    results = in_sizes.predict(batch, lambda step, steps: None)
    for result, expected in zip(results, drawn(tiny, tiny_preparer, inputs), strict=True):
        assert isinstance(result, ImageResult)
        assert np.abs(pixels(result) - pixels(expected)).max() <= 1


def test_a_size_that_is_not_compiled_is_drawn_as_it_is(
    in_sizes: ImageModel, tiny_preparer: Preparer
) -> None:
    inputs = [msgspec.structs.replace(TEXT, width=72, seed=seed) for seed in range(5)]
    assert [pixels(result).shape for result in drawn(in_sizes, tiny_preparer, inputs)] == [
        (64, 72, 3)
    ] * 5


def test_the_vae_takes_parts_where_memory_is_short(
    tiny: InferenceModel,
    catalog: Catalog,
    tiny_folder: Path,
    tiny_preparer: Preparer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device can decode only 64 x 64 pixels at once, so batches are decoded one by one, and
    larger images in tiles.
    """
    decode = AutoencoderKL._decode

    def decode_small(vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
        if z.shape[0] > 1 or (not vae.use_tiling and z.shape[2] * z.shape[3] > 8 * 8):
            raise torch.OutOfMemoryError("out of memory")
        return decode(vae, z, return_dict=return_dict)

    inputs = [msgspec.structs.replace(TEXT, seed=seed) for seed in (1, 2)]
    expected = [pixels(result) for result in drawn(tiny, tiny_preparer, inputs)]
    model = model_for(catalog.default("image"), tiny_folder, "cpu")
    model.setup()
    monkeypatch.setattr(AutoencoderKL, "_decode", decode_small)
    for mine, other in zip(drawn(model, tiny_preparer, inputs), expected, strict=True):
        assert np.abs(pixels(mine) - other).max() <= 1
    large = msgspec.structs.replace(TEXT, width=96, height=96)
    assert pixels(drawn(model, tiny_preparer, [large])[0]).shape == (96, 96, 3)


def test_memory_that_no_parts_can_save_is_told(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_for(catalog.default("image"), tiny_folder, "cpu")
    model.setup()

    def refuse(vae: Any, z: torch.Tensor, return_dict: bool = True) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AutoencoderKL, "_decode", refuse)
    batch = [
        item for item in tiny_preparer.prepare([TEXT, TEXT]) if isinstance(item, PreparedImage)
    ]
    with pytest.raises(OutOfMemory):
        model.predict(batch, lambda step, steps: None)
