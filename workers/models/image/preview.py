"""Draws small previews of images between two steps, by the VAE of the pipeline.

The latents are averaged first, so that the decoded image is small: the VAE takes time in proportion
to pixels. Linear factors for the channels of the latents (as in
https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204) take microseconds,
but they are another set for each VAE, and show a 64 x 64 image as 8 x 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch

from workers.models.base import RgbImage
from workers.models.image.codec import to_host
from workers.models.image.vae import decode

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
