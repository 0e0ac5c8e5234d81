"""Turns latents into images: the VAE, the copy to the host, previews, and PNG encoding.

Latents are decoded the way diffusers pipelines decode them after their loops. A preview between
steps is drawn by the same VAE. Its latents are averaged first so that the decoded image is small,
because the time the VAE takes is proportional to the number of pixels. Linear factors for the
latent channels (as in
https://discuss.huggingface.co/t/decoding-latents-to-rgb-without-upscaling/23204) take only
microseconds, but each VAE needs its own set, and a 64 x 64 image would be shown at 8 x 8.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from workers.models.base import PreparedImage, RgbImage

PNG_LEVEL = 1
"""The zlib compression level.

A 512 x 512 photograph takes 28 ms. The default level, 6, takes 50 ms and saves 12%.
"""

MAX_SIDE = {"cuda": 256}
MAX_SIDE_CPU = 128
"""On a CPU, a 256 x 256 image takes 190 ms with the shipped model, and one with a quarter of the
pixels takes 45 ms.
"""


def needs_fp32(pipeline: Any) -> bool:
    """Returns whether a pipeline's VAE overflows in fp16 and its class runs it in fp32 instead.

    If so, the VAE is loaded in fp32. Otherwise, a pipeline would switch the VAE temporarily, which
    would affect other items.
    """
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, diffusers.AutoencoderKL) or vae.dtype != torch.float16:
        return False
    return bool(vae.config.force_upcast) and hasattr(pipeline, "upcast_vae")


def _unscale(config: Any, latents: torch.Tensor) -> torch.Tensor:
    """Converts latents to the VAE's units."""
    factor: float = config.scaling_factor
    if config.latents_mean is None or config.latents_std is None:
        shift: float = config.shift_factor or 0.0
        return latents / factor + shift
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1).to(latents.device, latents.dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    return latents * deviation / factor + mean


def sources_on(device: torch.device, items: Sequence[PreparedImage]) -> torch.Tensor:
    """The source images of `items`, [items, 3, height, width], in fp32 from 0 to 1.

    Copies them as bytes.
    """
    shape = (len(items), items[0].height, items[0].width, 3)
    pixels = torch.frombuffer(
        bytearray(b"".join(item.source or b"" for item in items)), dtype=torch.uint8
    )
    if device.type == "cuda":
        pixels = pixels.pin_memory().to(device, non_blocking=True)
    return pixels.view(shape).permute(0, 3, 1, 2).float() / 255


@dataclass(slots=True, eq=False)
class HostCopy:
    """Images being copied to the host."""

    pixels: torch.Tensor
    """[items, height, width, 3], uint8."""
    finite: torch.Tensor
    """[items], True if all numbers in an image are finite."""
    is_there: Any
    """A CUDA event. None if the copy has already finished."""

    def wait(self) -> list[np.ndarray | None]:
        """Waits for the copy.

        Returns bytes [height, width, 3] per image, or None if its numbers aren't finite.
        """
        if self.is_there is not None:
            self.is_there.synchronize()
        are_finite = self.finite.tolist()
        return [
            image if good else None
            for image, good in zip(self.pixels.numpy(), are_finite, strict=True)
        ]


def copy_to_host(images: torch.Tensor) -> HostCopy:
    """Starts copying images [items, 3, height, width] from 0 to 1, without waiting for the copy."""
    finite = images.isfinite().flatten(1).all(1)
    pixels = (
        (images.float().nan_to_num() * 255)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .contiguous()
    )
    if images.device.type != "cuda":
        return HostCopy(pixels, finite, None)
    # Pinned memory makes the copy a single transfer rather than many through a buffer.
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        for tensor in (pixels, finite)
    ]
    is_there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_there.record(torch.cuda.current_stream(images.device))
    return HostCopy(copies[0], copies[1], is_there)


def encode(pixels: np.ndarray) -> bytes:
    """Encodes bytes [height, width, 3] as PNG."""
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG", compress_level=PNG_LEVEL)
    return encoded.getvalue()


def draw_preview(pipeline: Any, latents: torch.Tensor, width: int, height: int) -> RgbImage | None:
    """Draws a small image from latents between steps. None if the latents can't be decoded.

    Neither the latents nor any random number generator is changed.

    Args:
        latents: one image's latents, in the pipeline's format.
        width: width of the image, in pixels.
        height: height of the image, in pixels.
    """
    vae = getattr(pipeline, "vae", None)
    if latents.ndim == 3 and hasattr(pipeline, "_unpack_latents"):
        latents = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    # Some pipelines have a different type of VAE.
    if not isinstance(vae, diffusers.AutoencoderKL) or latents.ndim != 4:
        return None
    longest = MAX_SIDE.get(latents.device.type, MAX_SIDE_CPU)
    shrink = -(-max(width, height) // longest)
    if shrink > 1:
        latents = torch.nn.functional.avg_pool2d(latents, shrink, ceil_mode=True)
    decoded = vae.decode(_unscale(vae.config, latents.to(vae.dtype)), return_dict=False)[0]
    (pixels,) = copy_to_host((decoded / 2 + 0.5).clamp(0, 1)).wait()
    if pixels is None:
        return None
    return RgbImage(pixels.shape[1], pixels.shape[0], pixels.tobytes())
