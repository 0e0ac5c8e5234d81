"""Labels an image and embeds it with EfficientNet-Lite0 (ImageNet, 1000 classes).

The network: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path as LocalPath

import numpy as np
import torch
from cog import BaseModel, BasePredictor, Input, Path
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS = LocalPath(__file__).parent / "weights"
SIZE_PX = 224
CROPPED_SHARE = 224 / (224 + 32)
"""Fraction of the shorter side that is kept when cropping to the center, as in training."""
STAGES = (
    # repeats, kernel, stride, expansion, channels: the published table of EfficientNet-B0
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM_CHANNELS, FEATURES, CLASSES = 32, 1280, 1000
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


class SameConvolution(nn.Conv2d):
    """Pads like TensorFlow's `SAME`, which adds any odd pixel on the right or at the bottom."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolves a batch (n, channels, height, width)."""
        (size, _), (stride, _) = self.kernel_size, self.stride
        padding: list[int] = []
        for length in (x.shape[-1], x.shape[-2]):
            whole = max((-(-length // stride) - 1) * stride + size - length, 0)
            padding += [whole // 2, whole - whole // 2]
        return super().forward(functional.pad(x, padding))


def _convolution(
    inside: int, outside: int, size: int = 1, stride: int = 1, groups: int = 1
) -> nn.Module:
    return SameConvolution(inside, outside, size, stride, groups=groups, bias=False)


def _normalization(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3)


# The layers are named as in the weights file.
class Block(nn.Module):
    """An inverted bottleneck without squeeze and excitation, as used in the Lite networks."""

    def __init__(self, inside: int, outside: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = inside * expansion
        self.expands = expansion > 1
        self.adds_input = stride == 1 and inside == outside
        if self.expands:
            self._expand_conv, self._bn0 = _convolution(inside, middle), _normalization(middle)
        self._depthwise_conv = _convolution(middle, middle, size, stride=stride, groups=middle)
        self._bn1 = _normalization(middle)
        self._project_conv, self._bn2 = _convolution(middle, outside), _normalization(outside)

    def forward(self, x: Tensor) -> Tensor:
        """Processes a batch (n, channels, height, width)."""
        wide = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        wide = functional.relu6(self._bn1(self._depthwise_conv(wide)))
        narrow: Tensor = self._bn2(self._project_conv(wide))
        return narrow + x if self.adds_input else narrow


class EfficientNetLite0(nn.Module):
    """The network, without image preprocessing."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _convolution(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = _normalization(STEM_CHANNELS)
        blocks, inside = [], STEM_CHANNELS
        for repeats, size, stride, expansion, outside in STAGES:
            for number in range(repeats):
                blocks.append(Block(inside, outside, size, 1 if number else stride, expansion))
                inside = outside
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = _convolution(inside, FEATURES), _normalization(FEATURES)
        self._fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Processes a batch (n, 3, 224, 224). Returns logits (n, 1000) and features (n, 1280)."""
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        x = functional.relu6(self._bn1(self._conv_head(self._blocks(x))))
        features = x.mean((2, 3))
        return self._fc(features), features


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


def prepared(image: Image.Image) -> Tensor:
    """Crops and scales an image for the network: (1, 3, 224, 224), from -1 to 1."""
    side = round(min(image.size) * CROPPED_SHARE)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    middle = image.crop((left, top, left + side, top + side))
    middle = middle.resize((SIZE_PX, SIZE_PX), Image.Resampling.BICUBIC)
    numbers = np.asarray(middle, np.float32)
    return torch.from_numpy((numbers - 127) / 128).permute(2, 0, 1)[None]


def read_names() -> list[str]:
    """Returns class names in the network's order, as WordNet synset names."""
    lines = (WEIGHTS / "imagenet_synset_to_lemma.txt").read_text(encoding="utf-8").splitlines()
    names = dict(line.split("\t") for line in lines)
    order = (WEIGHTS / "imagenet_synsets.txt").read_text(encoding="utf-8").split()
    return [names[synset] for synset in order]


class Output(BaseModel):
    """The image's labels, most likely first, and its embedding."""

    labels: list[str]
    scores: list[float]
    embedding: list[float] | None


class Predictor(BasePredictor):
    """Names and embeds images."""

    def setup(self) -> None:
        """Loads the weights as plain tensors, because a pickle could run code."""
        if not WEIGHTS.is_dir():
            raise FileNotFoundError(f"{WEIGHTS} is missing; run: make example NAME=labels")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        file = WEIGHTS / "efficientnet-lite0-57934424.pth"
        self.network = EfficientNetLite0().eval()
        self.network.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
        self.network.to(self.device)
        self.names = read_names()

    def predict(
        self,
        image: Path = Input(description="The image: PNG, JPEG or WebP."),
        top: int = Input(description="How many labels to return.", default=5, ge=1, le=1000),
        embed: bool = Input(
            description=(
                "True to return an embedding of 1280 numbers with length 1. Images that look "
                "alike ' 'have embeddings with a high dot product."
            ),
            default=False,
        ),
    ) -> Output:
        """Returns the most likely labels with their probabilities."""
        source = read_image(image)
        with torch.inference_mode():
            logits, features = self.network(prepared(source).to(self.device))
            scores, places = logits[0].softmax(0).topk(top)
            embedding = functional.normalize(features[0], dim=0).tolist() if embed else None
        labels = [self.names[place] for place in places.tolist()]
        return Output(labels=labels, scores=scores.tolist(), embedding=embedding)
