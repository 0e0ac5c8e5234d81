"""Estimates how likely an image is pornographic, with Yahoo's Open-NSFW as an ONNX graph.

For the network and its training, see https://github.com/yahoo/open_nsfw. It does not detect
violence or other harm.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path as LocalPath
from typing import Any

import numpy as np
import onnxruntime
from cog import BaseModel, BasePredictor, Input, Path
from PIL import Image, ImageOps

WEIGHTS = LocalPath(__file__).parent / "weights"
RESIZED_PX, SIZE_PX = 256, 224
MEANS = (104, 117, 123)
"""Mean blue, green and red values of the training images."""
FORMATS = ("PNG", "JPEG", "WEBP")
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""Pillow raises these errors for a file that is damaged, in another format, or too large."""


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def read_image(path: Path) -> Image.Image:
    """Returns an image, upright and in RGB.

    Raises:
        InvalidInput: the image can't be read.
    """
    try:
        with Image.open(path, formats=FORMATS) as opened:
            return ImageOps.exif_transpose(opened).convert("RGB")
    except UNREADABLE as error:
        raise InvalidInput("image", "must be a readable PNG, JPEG or WebP file") from error


def prepared(image: Image.Image) -> Any:
    """Prepares an image for the network: (1, 224, 224, 3), in blue-green-red order.

    The network was trained on 256-pixel JPEG files, so the image is first converted to one.
    """
    resized = image.resize((RESIZED_PX, RESIZED_PX), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    resized.save(file, "JPEG")
    edge = (RESIZED_PX - SIZE_PX) // 2
    with Image.open(file) as decoded:
        numbers = np.asarray(decoded.convert("RGB"), np.float32)
    middle = numbers[edge : edge + SIZE_PX, edge : edge + SIZE_PX, ::-1]
    return (middle - np.array(MEANS, np.float32))[None]


class Output(BaseModel):
    """The network's classification of an image."""

    nsfw: float
    is_safe: bool


class Predictor(BasePredictor):
    """Scores images."""

    def setup(self) -> None:
        if not WEIGHTS.is_dir():
            raise FileNotFoundError(f"{WEIGHTS} is missing; run: make example NAME=safety")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
        file = str(WEIGHTS / "open_nsfw.onnx")
        self.session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def predict(
        self,
        image: Path = Input(description="The image: PNG, JPEG or WebP."),
        threshold: float = Input(
            description=(
                "An image with this probability or a higher one is not safe. The network's "
                "authors ' 'recommend no threshold; between 0.2 and 0.8, ask a person."
            ),
            default=0.5,
            ge=0,
            le=1,
        ),
    ) -> Output:
        """Returns the probability from 0 to 1, and whether it is below the threshold."""
        source = read_image(image)
        scores = self.session.run(None, {self.input: prepared(source)})[0]
        nsfw = float(scores[0, 1])
        return Output(nsfw=nsfw, is_safe=nsfw < threshold)
