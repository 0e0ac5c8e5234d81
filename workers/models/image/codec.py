"""Copies images between host and device, and encodes results as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image

from workers.models.base import PreparedImage

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
