"""Steps between drawing an image and delivering it: a safety check and an upscaler.

An image model's entry may name a model for each step (`image.safety`, `image.upscale`). A request
that needs either one runs as a flow whose first step draws the images. Each image is checked
separately, and upscaled if it is safe. A run therefore has a single deadline and price, and any
worker can continue it (docs/decisions/0113-after-the-image.md).

shared/models/image_flow.py builds these flows. Callers see only the image model: its name, its
version, and a list of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import Counter

from shared.errors import ModelFailed, ModerationBlocked
from shared.models.blob import Blob
from shared.models.image_flow import SAFETY, UPSCALE
from shared.models.tasks.base import TaskResult
from shared.models.tasks.image import ImageResult, ImagesResult

WITHHELD = Counter(
    "penstock_images_withheld_total",
    "Images that were drawn but not delivered, because a safety check flagged them.",
    ["model"],
)
_PNG = "image/png"


def images_of(scope: Mapping[str, Any], results: Sequence[TaskResult | None]) -> ImagesResult:
    """Returns a run's result.

    Args:
        scope: values of the run's input and steps, keyed by name.
        results: the results that the first step returned.

    Raises:
        ModerationBlocked: the check flagged all images.
        ModelFailed: the upscaler did not return a PNG file.
    """
    scale = scope["input"]["upscale"]
    checks, enlarged = scope.get(SAFETY), scope.get(UPSCALE)
    images: list[ImageResult | None] = []
    for number, image in enumerate(results):
        assert isinstance(image, ImageResult), (
            "all were drawn, or the run has failed; this is a bug"
        )
        if checks is not None and not _is_safe(checks[number]):
            images.append(None)
        elif enlarged is None:
            images.append(image)
        else:
            images.append(_enlarge(image, enlarged[number], scale))
    result = ImagesResult(images)
    if not result.delivered:
        raise ModerationBlocked(format_blocked_message(len(images)))
    return result


def _is_safe(check: Any) -> bool:
    return isinstance(check, Mapping) and check.get("is_safe") is True


def _enlarge(image: ImageResult, file: Any, scale: int) -> ImageResult:
    if not isinstance(file, Blob) or file.media_type != _PNG:
        raise ModelFailed(f"step {UPSCALE!r}: the model did not return a PNG file")
    width, height = image.width * scale, image.height * scale
    return msgspec.structs.replace(image, image=file, width=width, height=height)


def format_blocked_message(images: int) -> str:
    """Returns the error message for a request when all of its images are withheld."""
    subject = "the image was" if images == 1 else f"all {images} images were"
    return f"moderation_blocked: {subject} drawn and then withheld by the safety check"
