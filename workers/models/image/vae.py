"""Decodes latents as the pipelines of diffusers do after their loops, and saves memory there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch

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
