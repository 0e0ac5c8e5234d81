"""Images on their way out of latents: the VAE, the copy to the host, previews, and PNG.

Latents are decoded as the pipelines of diffusers do after their loops. A preview between two steps
is drawn by the same VAE. Its latents are averaged first, so that the decoded image is small: the
VAE takes time in proportion to pixels. Linear factors for the channels of the latents (as in
https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204) take microseconds,
but they are another set for each VAE, and show a 64 x 64 image as 8 x 8.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from workers.models.base import PreparedImage, RgbImage

_UPCAST = (diffusers.StableDiffusionXLPipeline, diffusers.StableDiffusionXLImg2ImgPipeline)
"""Pipelines that decode in fp32 if the VAE overflows in fp16."""


def decode(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decodes in the precision of the pipeline's own call.

    Args:
        pipeline: with an AutoencoderKL.
        latents: [items, channels, height, width], in the units of its UNet.

    Returns:
        [items, 3, height, width], about from -1 to 1.
    """
    vae = pipeline.vae
    with own_type(vae):
        overflows = vae.dtype == torch.float16 and vae.config.force_upcast
        if overflows and type(pipeline) in _UPCAST:
            vae.to(torch.float32)
        scaled = _unscaled(vae.config, latents.to(vae.dtype))
        decoded: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return decoded


def _unscaled(config: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents in the units of the VAE."""
    factor: float = config.scaling_factor
    if config.latents_mean is None or config.latents_std is None:
        shift: float = config.shift_factor or 0.0
        return latents / factor + shift
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1).to(latents.device, latents.dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    return latents * deviation / factor + mean


@contextmanager
def own_type(vae: Any) -> Iterator[None]:
    """Gives a VAE its type back at the end.

    Pipelines of Stable Diffusion XL make it fp32 for a while. If memory runs out in between, they
    leave it so, and it refuses the 16 bits of the next latents.

    Args:
        vae: of any kind. None if the pipeline has none.
    """
    before = getattr(vae, "dtype", None)
    try:
        yield
    finally:
        if before is not None and vae.dtype != before:
            vae.to(before)


def spare_memory(vae: Any, count: int) -> bool:
    """Makes the VAE process images one by one, or a single one in tiles.

    False if it does so already.
    """
    if not isinstance(vae, diffusers.AutoencoderKL) or (
        vae.use_slicing if count > 1 else vae.use_tiling
    ):
        return False
    if count > 1:
        vae.enable_slicing()
    else:
        vae.enable_tiling()
    return True


PNG_LEVEL = 1
"""The level of zlib.

A 512 x 512 photograph takes 28 ms. The default, 6, takes 50 ms and saves 12 %.
"""
_PNG_THREADS = 4


def sources_on(device: torch.device, items: Sequence[PreparedImage]) -> torch.Tensor:
    """The source images of `items`, [items, 3, height, width] fp32 from 0 to 1.

    Copies them as bytes.
    """
    shape = (len(items), items[0].height, items[0].width, 3)
    pixels = torch.frombuffer(
        bytearray(b"".join(item.source or b"" for item in items)), dtype=torch.uint8
    )
    if device.type == "cuda":
        pixels = pixels.pin_memory().to(device, non_blocking=True)
    return pixels.view(shape).permute(0, 3, 1, 2).float() / 255


def to_host(drawn: torch.Tensor) -> list[np.ndarray | None]:
    """Images [items, 3, height, width] from 0 to 1 to bytes [height, width, 3].

    None for one that is not finite.
    """
    finite = drawn.isfinite().flatten(1).all(1)
    pixels = (
        (drawn.float().nan_to_num() * 255)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .contiguous()
    )
    if drawn.device.type == "cuda":
        # Pinned memory makes the copy one transfer instead of many through a buffer.
        host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True)
        pixels = host.copy_(pixels, non_blocking=True)
        torch.cuda.current_stream(drawn.device).synchronize()
    return [
        image if good else None for image, good in zip(pixels.numpy(), finite.tolist(), strict=True)
    ]


def encode_all(images: Sequence[np.ndarray], *, at_once: bool) -> list[bytes]:
    """Encodes bytes [height, width, 3] as PNG.

    `at_once`: on threads, because zlib releases the GIL.
    """
    if not at_once or len(images) == 1:
        return [_encode(image) for image in images]
    with ThreadPoolExecutor(_PNG_THREADS) as threads:
        return list(threads.map(_encode, images))


def _encode(pixels: np.ndarray) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=PNG_LEVEL)
    return encoded.getvalue()


MAX_SIDE = {"cuda": 256}
MAX_SIDE_CPU = 128
"""A CPU takes 190 ms for 256 x 256 with the shipped model, and 45 ms for a quarter of it."""


def draw_previews(
    pipeline: Any, latents: torch.Tensor, indices: Sequence[int]
) -> list[RgbImage | None]:
    """Small images of the latents at `indices`. None if they can't be decoded.

    Neither the latents nor any generator of random numbers is changed.
    """
    vae = getattr(pipeline, "vae", None)
    # Some pipelines pack their latents, or have a VAE of another kind.
    if not isinstance(vae, diffusers.AutoencoderKL) or latents.ndim != 4:
        return [None] * len(indices)
    longest = MAX_SIDE.get(latents.device.type, MAX_SIDE_CPU)
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    shrink = -(-max(latents.shape[-2:]) * scale // longest)
    chosen = latents[list(indices)]
    if shrink > 1:
        chosen = torch.nn.functional.avg_pool2d(chosen, shrink, ceil_mode=True)
    # One by one: what a large batch needs of memory may not be left between two steps.
    decoded = [decode(pipeline, one[None]) for one in chosen]
    drawn = to_host((torch.cat(decoded) / 2 + 0.5).clamp(0, 1))
    return [
        None if pixels is None else RgbImage(pixels.shape[1], pixels.shape[0], pixels.tobytes())
        for pixels in drawn
    ]
