"""An image being drawn: its pipeline, the pipeline's arguments, and its progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.errors import ModelFailed
from workers.models.base import PreparedImage
from workers.models.image.controls import ControlStart
from workers.models.image.ip_adapters import IpAdapterStart
from workers.models.image.pipeline import guidance_name, parameters_of
from workers.models.image.prompts import LostTokens
from workers.models.image.resident_adapters import Applied
from workers.models.image.vae import sources_on

_NO_NEGATIVE: dict[str | None, str] = {"true_cfg_scale": " "}
"""The negative prompt for items without one. These pipelines apply guidance only if they get a
negative prompt, and their documentation uses a space for it.
"""
_OF_THE_SIZE = {"use_resolution_binning": False, "_auto_resize": False}
"""Makes pipelines draw at the item's size. Otherwise, some pipelines pick the nearest size from a
list, which may have more pixels than the item is charged for.
"""
_WITH_NEGATIVE_VALUES = frozenset(
    {
        "KandinskyCombinedPipeline",
        "KandinskyInpaintCombinedPipeline",
        "KandinskyV22CombinedPipeline",
        "KandinskyV22InpaintCombinedPipeline",
        "Kandinsky3Pipeline",
    }
)
"""Pipelines that return tensors from -1 to 1 (diffusers 0.42.1)."""
_FOUR_CHANNELS = 4
"""Channels of the latents and the UNet in Stable Diffusion's inpainting pipelines."""


@dataclass(slots=True, eq=False)
class Drawing:
    """An item being drawn."""

    item: PreparedImage
    pipeline: Any
    """The item's own pipeline."""
    lost: LostTokens
    adapter: Applied = None
    ip_adapter: IpAdapterStart | None = None
    controls: Sequence[ControlStart] = ()
    calls: int = 0
    """Denoiser calls so far."""
    done: int = 0
    """Steps so far."""
    latents: torch.Tensor | None = None
    """The latents after the item's last step, in the pipeline's format."""
    features: torch.Tensor | None = None
    """Deep features from the item's last step with a full UNet, [rows, channels, height, width]."""

    @property
    def steps(self) -> int:
        known: int | None = getattr(self.pipeline, "_num_timesteps", None)
        return known or max(1, self.item.length // (self.item.width * self.item.height))

    @property
    def pixels(self) -> int:
        return self.item.width * self.item.height

    def after_step(
        self, pipeline: Any, step: int, time: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        """The callback that the pipeline calls after each step."""
        self.done = step + 1
        self.latents = tensors.get("latents")
        return {}

    def draw(self) -> torch.Tensor:
        """Runs the pipeline. Returns an image [1, 3, height, width] from 0 to 1, on the device.

        Raises:
            ModelFailed: the pipeline's output isn't an image, or isn't the size that was charged
                for.
        """
        pixels: Any = self.pipeline(**self._arguments())[0]
        item = self.item
        if isinstance(pixels, torch.Tensor) and pixels.shape == (1, 3, item.height, item.width):
            has_negative = type(self.pipeline).__name__ in _WITH_NEGATIVE_VALUES
            return pixels / 2 + 0.5 if has_negative else pixels
        shape = tuple(getattr(pixels, "shape", ())) or type(pixels).__name__
        size = f"an image of {item.width} x {item.height} pixels"
        raise ModelFailed(f"the pipeline returned {shape} instead of {size}")

    def _arguments(self) -> dict[str, Any]:
        item, guidance = self.item, guidance_name(self.pipeline)
        known = parameters_of(self.pipeline)
        arguments: dict[str, Any] = {
            "prompt": item.prompt,
            "negative_prompt": item.negative_prompt or _NO_NEGATIVE.get(guidance),
            "height": item.height,
            "width": item.width,
            "num_inference_steps": item.steps,
            "guidance_rescale": item.guidance_rescale,
            "clip_skip": item.clip_skip or None,
            "generator": torch.Generator("cpu").manual_seed(item.seed),
            "output_type": "pt",
            "return_dict": False,
            "callback_on_step_end": self.after_step,
            **_OF_THE_SIZE,
            "max_area": self.pixels,
        }
        if guidance is not None:
            arguments[guidance] = item.guidance_scale
        if item.source is not None and item.strength is None:
            # Editing pipelines check the image's size.
            size = item.width, item.height
            arguments |= {"image": Image.frombytes("RGB", size, item.source), "strength": 1.0}
        elif item.source is not None:
            device = self.pipeline.device
            arguments |= {"image": sources_on(device, [item]), "strength": item.strength}
        if item.mask is not None:
            scale = self.pipeline.vae_scale_factor
            arguments["mask_image"] = _squares(item, scale)
            unet = getattr(self.pipeline, "unet", None)
            if unet is not None and unet.config.in_channels == _FOUR_CHANNELS:
                # For UNets trained with masks. Other pipelines would needlessly encode the masked
                # source, consuming random numbers in the process.
                size = item.height // scale, item.width // scale
                arguments["masked_image_latents"] = torch.zeros(1, _FOUR_CHANNELS, *size)
        # Options that the pipeline does not support have already been rejected.
        return {name: value for name, value in arguments.items() if name in known}


def _squares(item: PreparedImage, scale: int) -> torch.Tensor:
    """Returns a mask, [1, 1, height, …]. A latent's entire pixel square is 1 if any pixel in it is.

    Pipelines sample the nearest pixel for each latent, so thin masks would otherwise vanish.
    """
    pixels = torch.frombuffer(bytearray(item.mask or b""), dtype=torch.uint8)
    mask = (pixels > 0).float().view(1, 1, item.height, item.width)
    squares = torch.nn.functional.max_pool2d(mask, scale)
    return torch.nn.functional.interpolate(squares, size=(item.height, item.width))


def paste(pixels: np.ndarray, item: PreparedImage) -> np.ndarray:
    """Returns drawn pixels [height, width, 3] where the mask is 255, source pixels where it is 0.

    In between, the two are blended proportionally.
    """
    shape = pixels.shape
    source = np.frombuffer(item.source or b"", np.uint8).reshape(shape).astype(np.uint32)
    mask = np.frombuffer(item.mask or b"", np.uint8).reshape(*shape[:2], 1).astype(np.uint32)
    mixed = (pixels * mask + source * (255 - mask) + 127) // 255
    return mixed.astype(np.uint8)
