"""An entry's shortcuts: deep features reused across steps, and guidance that ends early."""

from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import pytest
import torch

from models.shapes.score import held_out, score_drawn
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.image_entry import DeepCacheSettings
from shared.models.tasks.image import ImageInput, ImageResult
from tests.workers.models.batches import model_for
from tests.workers.models.conftest import TinyPipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_masks import MASKED
from tests.workers.models.test_image_steps import difference, prepared, run
from workers.models.image.deep_cache import DeepCache
from workers.models.image.model import ImageModel

# Some of diffusers' schedulers use an outdated conversion between torch and NumPy 2.
pytestmark = [
    pytest.mark.slow(about_s=60),
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

GUIDED = msgspec.structs.replace(TEXT, guidance_scale=3.0, steps=8)
CHOICES: dict[str, dict[str, Any]] = {
    "deep_cache": {"deep_cache": DeepCacheSettings(cache_interval=3)},
    "guidance_stop": {"guidance_stop": 0.5},
    "both": {
        "deep_cache": DeepCacheSettings(cache_interval=2, cache_branch_id=1),
        "guidance_stop": 0.4,
    },
}


def with_shortcuts(catalog: Catalog, folder: Path, **fields: Any) -> ImageModel:
    entry = catalog.default("image")
    image = entry.image.model_copy(update=fields)
    model = model_for(entry.model_copy(update={"image": image}), folder, "cpu")
    assert isinstance(model, ImageModel)
    model.setup()
    return model


def alone(model: ImageModel, family: TinyPipeline, value: ImageInput) -> ImageResult:
    result = run(model, family.preparer, [(0, value)])[0]
    assert isinstance(result, ImageResult), result
    return result


@pytest.mark.parametrize("choice", CHOICES)
def test_pixels_are_those_of_an_image_alone(
    catalog: Catalog, family: TinyPipeline, choice: str
) -> None:
    """The image is drawn alongside images of other kinds and images at other steps."""
    model = with_shortcuts(catalog, family.folder, **CHOICES[choice])
    values = [
        GUIDED,
        msgspec.structs.replace(GUIDED, seed=5, steps=7, scheduler="euler_a"),
        msgspec.structs.replace(GUIDED, seed=6, guidance_scale=1.0),
        msgspec.structs.replace(FROM_IMAGE, seed=7, steps=9, guidance_scale=3.0),
        msgspec.structs.replace(MASKED, seed=8, steps=6, guidance_scale=3.0),
    ]
    expected = [alone(model, family, value) for value in values]
    together = run(model, family.preparer, [(step, value) for step, value in enumerate(values)])
    for slot, one in enumerate(expected):
        assert difference(together[slot], one) <= 1


@pytest.mark.parametrize("branch", [0, 1])
def test_outer_layers_around_features_of_the_same_step_are_the_whole_unet(
    catalog: Catalog, family: TinyPipeline, branch: int
) -> None:
    """This also holds with a ControlNet's residuals, and with two rows for each image."""
    model = with_shortcuts(catalog, family.folder)
    unet: Any = model._main.unet
    cache = DeepCache(DeepCacheSettings(cache_branch_id=branch), model._main)
    noise = torch.Generator().manual_seed(1)
    channels, down = unet.config.in_channels, _residual_shapes(unet)
    arguments: dict[str, Any] = {
        "sample": torch.randn((2, channels, 8, 8), generator=noise),
        "timestep": torch.tensor([500.0] * 2),
        "encoder_hidden_states": torch.randn(
            (2, 77, unet.config.cross_attention_dim), generator=noise
        ),
    }
    if unet.config.addition_embed_type is not None:
        arguments["added_cond_kwargs"] = {
            "text_embeds": torch.randn((2, 32), generator=noise),
            "time_ids": torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * 2),
        }
    added = {
        "down_block_additional_residuals": tuple(torch.randn(one, generator=noise) for one in down),
        "mid_block_additional_residual": torch.randn(down[-1], generator=noise),
    }
    with torch.inference_mode():
        for more in ({}, added):
            whole = unet(**arguments, **more).sample
            outer = cache.predict(arguments, cache.take_features(), more)
            assert torch.allclose(outer, whole, atol=1e-5)


def _residual_shapes(unet: Any) -> list[tuple[int, ...]]:
    """The shapes of a ControlNet's residuals for 8 x 8 latents: conv_in, each layer and each
    downsampler.
    """
    side = 8
    shapes: list[tuple[int, ...]] = [(2, unet.config.block_out_channels[0], side, side)]
    for block, width in zip(unet.down_blocks, unet.config.block_out_channels, strict=True):
        shapes += [(2, width, side, side)] * len(block.resnets)
        if block.downsamplers:
            side //= 2
            shapes.append((2, width, side, side))
    return shapes


def test_deep_features_change_the_image_and_the_charge_stays(
    catalog: Catalog, family: TinyPipeline
) -> None:
    plain = with_shortcuts(catalog, family.folder)
    cached = with_shortcuts(catalog, family.folder, **CHOICES["deep_cache"])
    whole, shorter = (alone(model, family, GUIDED) for model in (plain, cached))
    assert difference(shorter, whole) > 1
    assert shorter.pixel_steps == whole.pixel_steps


def test_after_guidance_an_image_computes_one_row_as_in_diffusers(
    catalog: Catalog, family: TinyPipeline
) -> None:
    """The reference is diffusers' recipe for ending guidance early: a callback after a step."""
    model = with_shortcuts(catalog, family.folder, guidance_stop=0.5)
    usual = GUIDED.width * GUIDED.height
    model.admit(0, prepared(family.preparer, GUIDED))
    work = [model.step().work for _ in range(GUIDED.steps)]
    assert work == [2 * usual] * 4 + [usual] * 4
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(
        family.folder, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = model._schedulers.create(GUIDED.scheduler)
    names = ["prompt_embeds"]
    if hasattr(pipeline, "text_encoder_2"):
        names += ["add_text_embeds", "add_time_ids"]

    def end_guidance(drawing: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            drawing._guidance_scale = 0.0
            return {name: tensors[name].chunk(2)[-1] for name in names}
        return {}

    drawn = pipeline(
        GUIDED.prompt,
        negative_prompt=GUIDED.negative_prompt or None,
        width=GUIDED.width,
        height=GUIDED.height,
        num_inference_steps=GUIDED.steps,
        guidance_scale=GUIDED.guidance_scale,
        generator=torch.Generator().manual_seed(GUIDED.seed),
        callback_on_step_end=end_guidance,
        callback_on_step_end_tensor_inputs=names,
    ).images[0]
    ours = pixels(alone(model, family, GUIDED))
    assert np.abs(ours - np.asarray(drawn).astype(int)).max() <= 1


def test_an_entry_that_the_unet_can_t_follow_is_refused(
    catalog: Catalog, tiny_folder: Path
) -> None:
    with pytest.raises(ConfigurationError, match="got 8") as caught:
        with_shortcuts(catalog, tiny_folder, deep_cache=DeepCacheSettings(cache_branch_id=8))
    assert caught.value.field == "image.deep_cache.cache_branch_id"
    with pytest.raises(ConfigurationError, match="requires a Stable Diffusion") as caught:
        DeepCache(DeepCacheSettings(), diffusers.FluxPipeline)
    assert caught.value.field == "image.deep_cache"


CAPTIONS = 16


@pytest.mark.parametrize("choice", ["deep_cache", "guidance_stop"])
def test_the_judge_still_reads_what_was_asked_for(
    catalog: Catalog, tiny_folder: Path, tiny_preparer: Any, choice: str
) -> None:
    usual = catalog.default("image").image
    model = with_shortcuts(catalog, tiny_folder, **CHOICES[choice])
    asked = held_out(CAPTIONS)
    values = [
        ImageInput(
            prompt=one.caption,
            width=usual.width,
            height=usual.height,
            steps=usual.steps,
            guidance_scale=usual.guidance_scale,
            seed=one.seed,
            scheduler=usual.scheduler,
        )
        for one in asked
    ]
    results = run(model, tiny_preparer, [(0, value) for value in values])
    images = []
    for slot in range(CAPTIONS):
        result = results[slot]
        assert isinstance(result, ImageResult)
        images.append(pixels(result).astype(np.uint8))
    table = score_drawn(asked, images)
    assert table["color right"].part >= 0.9
    assert table["shape right"].part >= 0.85
