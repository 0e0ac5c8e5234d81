"""Encodes finished images as PNG files, on threads, so that other images' steps continue."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from shared.errors import ModelFailed, PenstockError
from shared.models.blob import Blob
from shared.models.tasks import Result
from shared.models.tasks.image import ImageResult
from workers.models.base import PreparedImage
from workers.models.image.drawing import Drawing, paste
from workers.models.image.vae import HostCopy, encode

_ENCODED_AT_ONCE = 128 * 128
"""Maximum number of pixels in an image that is encoded without using a thread. Encoding an image of
this size as PNG takes under a millisecond.
"""
_PNG_THREADS = 4


class ImageFiles:
    """Encodes the images drawn on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: tuple[int, ThreadPoolExecutor] | None = None

    def begin(self, drawing: Drawing, pixels: HostCopy) -> Future[Result | PenstockError]:
        """Encodes an image file, on a thread unless the image is small."""
        finish = partial(_finish, drawing.item, drawing.lost.count, pixels)
        if self._device.type == "cpu" and drawing.pixels <= _ENCODED_AT_ONCE:
            done: Future[Result | PenstockError] = Future()
            done.set_result(finish())
            return done
        # A forked process doesn't inherit its parent's threads.
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads = os.getpid(), ThreadPoolExecutor(_PNG_THREADS, "png")
        return self._threads[1].submit(finish)


def _finish(
    item: PreparedImage, truncated_tokens: int | None, copied: HostCopy
) -> Result | PenstockError:
    (pixels,) = copied.wait()
    if pixels is None:
        return ModelFailed(
            "the image has NaN or infinite values; the precision may be too low for this model"
        )
    if item.mask is not None:
        pixels = paste(pixels, item)
    return ImageResult(
        image=Blob("image/png", encode(pixels)),
        width=item.width,
        height=item.height,
        seed=item.seed,
        pixel_steps=item.length,
        truncated_tokens=truncated_tokens,
        adapter=item.adapter or None,
    )
