"""Stable Diffusion 1.5 with random weights: eager diffusers compared with our ImageModel.

Nothing is downloaded: speed doesn't depend on the values of the weights. Per batch size:

- `plain`: diffusers' pipeline, as in its documentation, which ends with PIL images.
- `ours, eager` and `ours`: ImageModel, without compiling and compiled. Both end with PNG files, so
  the comparison favors `plain` by the time it takes to encode them.
- `bare`: only a compiled UNet with guidance, a fused DDIM step, and a compiled VAE. There is no
  scheduler, text encoder, copy to the host, or PNG.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as replace_scale
from functools import partial
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from msgspec.structs import replace
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from bench.gpu.card import DTYPES, in_turns, medians
from bench.gpu.company import text_image
from bench.gpu.scale import Scale
from bench.report import Figure
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
"""A worker compiles all sizes over the course of several starts. Here, it must do so in a single
start.
"""


def measure(scale: Scale, folder: Path, matrix_tflops: float) -> Iterator[Figure]:
    """Yields each contender's images/s by task and batch size.

    For batches larger than `scale.compiled`, there are no compiled contenders.
    """
    plain = _Plain(folder, scale)
    eager = _load(folder, scale, max(scale.batches), compile="never")
    compiled = _load(folder, scale, scale.compiled, compile="auto")
    for mode in ("text-to-image", "image-to-image"):
        items = [image_item(mode, number, scale) for number in range(max(scale.batches))]
        tera_per_image = plain.operations(items[0]) / 1e12
        for count in scale.batches:
            batch = items[:count]
            contenders: dict[str, Callable[[], Any]] = {
                "plain": partial(plain.draw, batch),
                "ours, eager": partial(draw, eager, batch),
            }
            if count <= scale.compiled:
                contenders["ours"] = partial(draw, compiled, batch)
            if count == scale.compiled and mode == "text-to-image":
                contenders["bare"] = _BareLoop(folder, scale, count).draw
            taken_s = medians(in_turns(scale, contenders))
            rates = {name: count / call_s for name, call_s in taken_s.items()}
            for name, rate in rates.items():
                label = f"{mode}, batch {count}, {name}"
                yield Figure(label, rate, "images/s")
                yield Figure(label, rate * tera_per_image / matrix_tflops, "of matrix rate")
                yield Figure(f"{label} over plain", rate / rates["plain"], "times")


def _load(
    folder: Path, scale: Scale, largest: int, *, compile: Literal["auto", "never"]
) -> ImageModel:
    entry = image_entry(folder, replace_scale(scale, batches=(largest,)), compile=compile)
    model = load_model(entry, folder, scale)
    model.warmup()
    return model


def load_model(
    entry: Model, pipeline: Path, scale: Scale, *, memory_fraction: float = 1.0
) -> ImageModel:
    device = Device(scale.device, threads=1, memory_fraction=memory_fraction)
    model = ImageModel(entry, pipeline, device, warmup_limit_s=WARMUP_LIMIT_S)
    model.setup()
    return model


class _BareLoop:
    """The compiled DDIM denoising loop and VAE, and nothing else."""

    def __init__(self, folder: Path, scale: Scale, count: int) -> None:
        options = {"torch_dtype": DTYPES[scale.precision], "local_files_only": True}
        self._unet: Any = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet", **options)
        self._vae: Any = diffusers.AutoencoderKL.from_pretrained(folder / "vae", **options)
        for part in (self._unet, self._vae):
            part.to(scale.device, memory_format=torch.channels_last)
        self._vae.enable_slicing()
        self._decode = self._vae.decode
        if scale.device != "cpu":
            self._unet.fuse_qkv_projections()
            self._unet.forward = torch.compile(
                self._unet.forward, mode="reduce-overhead", dynamic=False
            )
            self._vae.decoder.forward = torch.compile(
                self._vae.decoder.forward, mode="reduce-overhead", dynamic=False
            )
        make = partial(torch.randn, device=scale.device, dtype=DTYPES[scale.precision])
        config = self._unet.config
        side = scale.side // 2 ** (len(self._vae.config.block_out_channels) - 1)
        self._latents = make(count, config.in_channels, side, side)
        self._prompts = make(2 * count, PROMPT_TOKENS, config.cross_attention_dim)
        # Like our hub, it stays on the device, so that no step waits for the host.
        self._times = torch.linspace(999, 1, scale.text_steps, device=scale.device)

    def draw(self) -> torch.Tensor:
        latents = self._latents
        with torch.inference_mode():
            for time in self._times:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                predicted = self._unet(
                    torch.cat([latents, latents]), time, self._prompts, return_dict=False
                )[0]
                without, with_prompt = predicted.chunk(2)
                noise = without + GUIDANCE * (with_prompt - without)
                latents = 0.98 * latents + 0.1 * noise
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            images: torch.Tensor = self._decode(latents, return_dict=False)[0]
        return images


def draw(model: ImageModel, batch: list[PreparedImage]) -> None:
    """Generates a batch of images as a model process does, and checks that it produced images."""
    for group in model.groups(batch):
        for result in model.predict([batch[index] for index in group], lambda step, steps: None):
            if not isinstance(result, ImageResult):
                raise RuntimeError(f"no image but {result!r}")


class _Plain:
    """The pipelines, loaded as shown in diffusers' documentation."""

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
        """Returns the number of floating-point operations for one image.

        A multiply-add counts as two.
        """
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


def image_entry(folder: Path, scale: Scale, **image: Any) -> Model:
    """Returns the catalog entry of a pipeline. `image` sets more fields of its `image`."""
    largest = max(scale.batches)
    return Model(
        name="stable-diffusion-random",
        task="image",
        source=f"local:{folder}",
        backend="torch",
        batch=Batch(max_items=largest, max_pixel_steps=largest * scale.side**2 * scale.text_steps),
        image=ImageDefaults(
            width=scale.side,
            height=scale.side,
            steps=scale.text_steps,
            guidance_scale=GUIDANCE,
            **image,
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
