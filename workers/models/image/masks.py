"""Draws within a mask only: the rest of the source stays, in latents at each step and in pixels.

A UNet that takes as many channels as its VAE has knows no masks. After each step, its latents
outside of the mask are replaced by the source's, with the noise of the next timestep (RePaint,
https://arxiv.org/abs/2201.09865, without resampling, as in StableDiffusionInpaintPipeline). A UNet
of twice as many channels and one was trained with masks: it also gets the mask, and the latents of
the source without what is masked.

A latent stands for a square of pixels, and is drawn anew if a single pixel of them is. In the end
each pixel outside is the source's own, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workers.models.base import PreparedImage
from workers.models.image.family import Family, denoiser_of
from workers.models.image.vae import own_type, sources_on


@dataclass(slots=True, eq=False)
class MaskedStart:
    """The source and the mask of an item in latents. All tensors are [1, …, height, width]."""

    grid: torch.Tensor
    """1 where latents are drawn anew, and 0 elsewhere. One channel."""
    noise: torch.Tensor
    source: torch.Tensor | None
    """The source's latents. None: the UNet was trained with masks."""
    trained: torch.Tensor | None
    """What such a UNet gets beside the latents: the mask, and the source without what is masked."""

    def unet_input(self, scaled: torch.Tensor) -> torch.Tensor:
        """The latents of an item as the UNet takes them."""
        return scaled if self.trained is None else torch.cat([scaled, self.trained], dim=1)

    def blended(
        self,
        latents: torch.Tensor,
        family: Family,
        scheduler: Any,
        next_time: torch.Tensor | None,
    ) -> torch.Tensor:
        """The latents after a step, with the source's own outside of the mask.

        Args:
            latents: of the item.
            family: of its pipeline.
            scheduler: its own, after the step.
            next_time: the timestep of the next step. None: this was the last one.
        """
        if self.source is None:
            return latents
        own = self.source
        if next_time is not None:
            own = family.noised(scheduler, own, self.noise, next_time.reshape(1))
        return (1 - self.grid) * own + self.grid * latents


def is_trained_with_masks(pipeline: Any) -> bool:
    """Returns whether the denoiser takes a mask and a masked image beside the latents."""
    denoiser, vae = denoiser_of(pipeline), getattr(pipeline, "vae", None)
    if denoiser is None or vae is None:
        return False
    channels = vae.config.get("latent_channels")
    return channels is not None and bool(denoiser.config.in_channels == 2 * channels + 1)


def start_masked(
    pipeline: Any,
    family: Family,
    item: PreparedImage,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, MaskedStart]:
    """Prepares an item with a mask as the pipeline's own call does before its loop.

    Args:
        pipeline: an inpainting one of diffusers. Its scheduler has the timesteps of the item.
        family: of the pipeline.
        item: with a source and a mask.
        generator: of its random numbers.
        dtype: of the denoiser.

    Returns:
        The timesteps before it, its latents at the first of them, and what its steps need.
    """
    device = pipeline.device
    size = item.height, item.width
    source = pipeline.image_processor.preprocess(sources_on(device, [item]))
    squares = _squares(item, pipeline.vae_scale_factor).to(device)
    timesteps, _ = pipeline.get_timesteps(item.steps, item.strength, device)
    is_trained = is_trained_with_masks(pipeline)
    with own_type(pipeline.vae):
        latents, noise, own = family.from_mask(
            pipeline,
            source,
            timesteps[:1],
            dtype,
            generator,
            only_noise=item.strength == 1,
            keeps_source=not is_trained,
        )
        if not is_trained:
            return timesteps, latents, MaskedStart(squares.to(dtype), noise, own, None)
        # Nearest, so that each pixel has the value of its square.
        mask = torch.nn.functional.interpolate(squares, size=size)
        trained = family.mask_inputs(pipeline, mask, source * (mask < 0.5), dtype, generator)
    return timesteps, latents, MaskedStart(trained[0], noise, None, torch.cat(trained, dim=1))


def _squares(item: PreparedImage, scale: int) -> torch.Tensor:
    """1 for each latent with a pixel to draw anew, [1, 1, height, width] of the latents."""
    pixels = torch.frombuffer(bytearray(item.mask or b""), dtype=torch.uint8)
    drawn = (pixels > 0).float().view(1, 1, item.height, item.width)
    return torch.nn.functional.max_pool2d(drawn, scale)


def pasted(drawn: np.ndarray, item: PreparedImage) -> np.ndarray:
    """The drawn pixels [height, width, 3] where the mask is 255, and the source's where it is 0.

    In between, they are mixed in proportion.
    """
    shape = drawn.shape
    source = np.frombuffer(item.source or b"", np.uint8).reshape(shape).astype(np.uint32)
    mask = np.frombuffer(item.mask or b"", np.uint8).reshape(*shape[:2], 1).astype(np.uint32)
    mixed = (drawn * mask + source * (255 - mask) + 127) // 255
    return mixed.astype(np.uint8)
