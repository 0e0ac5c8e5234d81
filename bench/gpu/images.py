"""Stable Diffusion 1.5 with random weights: eager diffusers compared with our ImageModel.

Nothing is downloaded: speed doesn't depend on the values of the weights. Ours produces PNG files,
plain diffusers PIL images, so the comparison favors diffusers by the encoding time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from msgspec.structs import replace
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from bench.gpu.card import DTYPES, in_turns
from bench.gpu.company import text_image
from bench.gpu.scale import Scale
from models.shapes import PIPELINE
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.image_entry import ImageDefaults
from shared.models.tasks.image import ImageResult
from workers.models.base import PreparedImage
from workers.models.device import Device
from workers.models.image.model import ImageModel

STRENGTH = 0.5
GUIDANCE = 7.5
SEED = 20240501
PROMPT_TOKENS = 77
WARMUP_LIMIT_S = 3600.0
"""A worker compiles all sizes over a few starts. Here it must do so in one."""


def measure(scale: Scale, folder: Path, matrix_tflops: float) -> list[dict[str, Any]]:
    """Returns a row per task and batch size: s per image, images/s and TFLOP/s, plain and ours."""
    plain = _Plain(folder, scale)
    device = Device(scale.device, threads=1, memory_fraction=1.0)
    ours = ImageModel(image_entry(folder, scale), folder, device, warmup_limit_s=WARMUP_LIMIT_S)
    ours.setup()
    ours.warmup()
    rows = []
    for mode in ("text-to-image", "image-to-image"):
        items = [image_item(mode, number, scale) for number in range(max(scale.batches))]
        tera_per_image = plain.operations(items[0]) / 1e12
        for count in scale.batches:
            batch = items[:count]
            contenders: dict[str, Callable[[], Any]] = {
                "plain": lambda batch=batch: plain.draw(batch),  # type: ignore[misc]
                "ours": lambda batch=batch: draw(ours, batch),  # type: ignore[misc]
            }
            taken = in_turns(scale, contenders)
            row: dict[str, Any] = {"task": mode, "batch": count}
            for name, call_s in taken.items():
                rate = count / call_s
                row[name] = {
                    "seconds_per_image": call_s / count,
                    "images_per_s": rate,
                    "tflops": rate * tera_per_image,
                    "of_matrix_rate": rate * tera_per_image / matrix_tflops,
                }
            rows.append(row | {"ratio": taken["plain"] / taken["ours"]})
    return rows


def draw(model: ImageModel, batch: list[PreparedImage]) -> None:
    """Draws a batch the way a model process does, and checks that it produced images."""
    for group in model.groups(batch):
        for result in model.predict([batch[index] for index in group], lambda step, steps: None):
            if not isinstance(result, ImageResult):
                raise RuntimeError(f"no image but {result!r}")


class _Plain:
    """The pipelines, loaded as in diffusers' documentation."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        dtype = DTYPES[scale.precision]
        options = {"dtype": dtype, "safety_checker": None, "local_files_only": True}
        self._text = diffusers.StableDiffusionPipeline.from_pretrained(folder, **options).to(
            scale.device
        )
        self._image = diffusers.StableDiffusionImg2ImgPipeline(
            **self._text.components, requires_safety_checker=False
        )
        for pipeline in (self._text, self._image):
            pipeline.set_progress_bar_config(disable=True)

    def draw(self, batch: list[PreparedImage]) -> Any:
        return draw_plain(self._text if batch[0].source is None else self._image, batch)

    def operations(self, item: PreparedImage) -> float:
        """Returns the floating-point operations of one image. A multiply-add counts as two."""
        with FlopCounterMode(display=False) as counter:
            self.draw([item])
        return float(counter.get_total_flops())


def draw_plain(pipeline: Any, batch: Sequence[PreparedImage]) -> Any:
    first = batch[0]
    size = {"width": first.width, "height": first.height}
    sources = [
        Image.frombytes("RGB", (first.width, first.height), item.source)
        for item in batch
        if item.source
    ]
    more = {"image": sources, "strength": first.strength} if sources else size
    return pipeline(
        prompt=[item.prompt for item in batch],
        num_inference_steps=first.steps,
        guidance_scale=first.guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(item.seed) for item in batch],
        **more,
    ).images


def image_item(mode: str, number: int, scale: Scale) -> PreparedImage:
    is_text = mode == "text-to-image"
    steps = scale.text_steps if is_text else scale.image_steps
    item = text_image(scale.side, steps, GUIDANCE)
    item = replace(item, key=mode, seed=number, prompt=f"{item.prompt}, number {number}")
    if is_text:
        return item
    pixels = scale.side * scale.side
    work = pixels * int(steps * STRENGTH)
    return replace(item, length=work, strength=STRENGTH, source=os.urandom(3 * pixels))


def image_entry(folder: Path, scale: Scale) -> Model:
    largest = max(scale.batches)
    return Model(
        name="stable-diffusion-random",
        task="image",
        source=f"local:{folder}",
        backend="torch",
        batch=Batch(max_items=largest, max_pixel_steps=largest * scale.side**2 * scale.text_steps),
        image=ImageDefaults(
            width=scale.side, height=scale.side, steps=scale.text_steps, guidance_scale=GUIDANCE
        ),
    )


def write_pipeline(folder: Path, scale: Scale) -> None:
    """Writes a full-width pipeline with random 16-bit weights, about 2 GB, or the shipped one."""
    if not scale.is_full_width:
        shutil.copytree(PIPELINE, folder)
        return
    torch.manual_seed(SEED)
    tokenizer = CLIPTokenizer.from_pretrained(
        PIPELINE / "tokenizer", model_max_length=PROMPT_TOKENS
    )
    pipeline = diffusers.StableDiffusionPipeline(
        tokenizer=tokenizer,
        **full_width_parts(tokenizer.bos_token_id, tokenizer.eos_token_id),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)


def full_width_parts(start_token: int, end_token: int) -> dict[str, torch.nn.Module]:
    """Returns the networks of Stable Diffusion 1.5, with the shapes in its config.json files."""
    text = CLIPTextConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        bos_token_id=start_token,
        eos_token_id=end_token,
    )
    return {
        "text_encoder": CLIPTextModel(text),
        "unet": diffusers.UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8
        ),
        "vae": diffusers.AutoencoderKL(
            sample_size=512,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ),
    }
