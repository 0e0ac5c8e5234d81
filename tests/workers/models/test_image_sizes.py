"""Image sizes: interfaces state the multiple that each family's pipelines really need."""

from __future__ import annotations

from typing import Any

import diffusers
import msgspec
import pytest
import torch

from shared.errors import BadInput
from tests.workers.models.test_image_hub import TASKS, make
from tests.workers.models.tiny_families import SIDE
from tests.workers.shipped_models import IMAGE
from workers.models.image.compilation import EagerCalls
from workers.models.image.options import OptionCheck, describe
from workers.models.image.pipeline import LoadedPipelines

pytestmark = [pytest.mark.slow(about_s=60), pytest.mark.filterwarnings("ignore")]

DIFFERS = {
    "checks for the real VAE's 8, 16, or 32 pixels per latent": (
        *("stable-diffusion", "sdxl", "lcm", "pixart-alpha", "pixart-sigma", "sana", "sana-sprint"),
        *("lumina", "lumina2", "cogview3", "cogview4", "kandinsky-3"),
    ),
    "draws as many pixels as `max_area`, no matter what size": ("flux-kontext",),
    "draws about as many pixels as by default, no matter what size": ("hidream",),
    "has no place for more": ("aura-flow",),
}
"""Families whose tiny pipelines can't show the multiple, by reason."""
LEFT_OUT = {name for names in DIFFERS.values() for name in names}


def pipelines_of(pipeline: Any) -> LoadedPipelines:
    return LoadedPipelines(pipeline, {"text": pipeline}, EagerCalls())


@pytest.mark.parametrize(("name", "kind"), [task for task in TASKS if task[0] not in LEFT_OUT])
@torch.inference_mode()
def test_sides_may_be_any_multiple(name: str, kind: str) -> None:
    tiny = make(name, kind)
    side = SIDE + describe(pipelines_of(tiny.pipeline)).defaults.multiple
    drawn = tiny.pipeline(**tiny.arguments(1, 2, side))[0]
    assert drawn.shape[-2:] == (side, side)


@torch.inference_mode()
def test_kandinsky_3_has_as_many_latents_as_a_latent_has_pixels() -> None:
    tiny = make("kandinsky-3", "Kandinsky3Pipeline")
    tiny.pipeline.register_modules(
        movq=diffusers.VQModel(
            block_out_channels=(32,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=4,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        )
    )
    multiple = describe(pipelines_of(tiny.pipeline)).defaults.multiple
    assert multiple == 64
    assert tiny.pipeline(**tiny.arguments(1, 2, multiple))[0].shape[-2:] == (multiple, multiple)


@pytest.mark.parametrize(
    ("name", "kind", "side", "reason"),
    [
        ("kandinsky-2.2", "KandinskyV22CombinedPipeline", 34, "a multiple of 4"),
        ("qwen-image-2.1", "QwenImage21Pipeline", 48, "a multiple of 32"),
        ("aura-flow", "AuraFlowPipeline", 34, "at most 32"),
    ],
)
def test_other_sizes_are_refused(name: str, kind: str, side: int, reason: str) -> None:
    check = OptionCheck(pipelines_of(make(name, kind).pipeline), IMAGE.guidance_scale)
    for field in ("width", "height"):
        sides = {"width": SIDE, "height": SIDE} | {field: side}
        refused = check.refusal(msgspec.structs.replace(IMAGE, **sides))
        assert isinstance(refused, BadInput)
        assert refused.message == f"{field} must be {reason} for this model, got {side}"
    fits = msgspec.structs.replace(IMAGE, width=SIDE, height=SIDE)
    assert check.refusal(fits) is None
