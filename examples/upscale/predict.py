"""Upscales an image four times with Real-ESRGAN x4plus (https://arxiv.org/abs/2107.10833).

The weights are ncnn files, as published upstream: a list of layers (`.param`) and their weights
(`.bin`). Both are parsed here and run by torch. For the file format, see
https://github.com/Tencent/ncnn/wiki/param-and-model-file-structure.
"""

from __future__ import annotations

import math
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import NamedTuple

import numpy as np
import torch
from cog import BasePredictor, Input, Path, current_scope
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

WEIGHTS = LocalPath(__file__).parent / "weights"
SCALE = 4
TILE_PX = 192
"""Larger images are processed in tiles of this size, to limit memory."""
OVERLAP_PX = 16
"""Overlap of a tile with its neighbors, which hides the seams."""
MAX_PIXELS = 1024 * 1024
"""Maximum size of the input. The result has 16 times as many pixels."""
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

_MAGIC = 7767517
_FLOAT16 = 0x01306B47
"""Marks half-precision weights. The upstream file contains only such weights."""
_NEAREST = 1


class Layer(NamedTuple):
    """One line of a `.param` file."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    options: dict[int, float]
    """Numbers by key."""
    lists: dict[int, list[float]]
    """Lists of numbers, by key."""


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


def read_image(path: Path) -> Image.Image:
    """Returns an image, upright and in RGB, or in RGBA if it is transparent.

    Raises:
        InvalidInput: the image can't be read or is too large.
    """
    try:
        with Image.open(path, formats=FORMATS) as opened:
            size = f"{opened.width} x {opened.height}"
            if opened.width * opened.height > MAX_PIXELS:
                raise InvalidInput("image", f"must be at most {MAX_PIXELS} pixels, got {size}")
            return ImageOps.exif_transpose(opened).convert(
                "RGBA" if opened.has_transparency_data else "RGB"
            )
    except InvalidInput:
        raise
    except UNREADABLE as error:
        raise InvalidInput("image", "must be a readable PNG, JPEG or WebP file") from error


def read_layers(text: str) -> list[Layer]:
    """Parses a `.param` file.

    Raises:
        ValueError: the file has another format.
    """
    magic, _, *lines = text.splitlines()
    if int(magic) != _MAGIC:
        raise ValueError("not an ncnn .param file")
    return [_read_layer(line.split()) for line in lines]


def _read_layer(words: list[str]) -> Layer:
    kind, _, inputs, outputs, *rest = words
    split, end = int(inputs), int(inputs) + int(outputs)
    options: dict[int, float] = {}
    lists: dict[int, list[float]] = {}
    for word in rest[end:]:
        key, _, value = word.partition("=")
        if int(key) <= -23300:  # a list, preceded by its length
            lists[-23300 - int(key)] = [float(number) for number in value.split(",")[1:]]
        else:
            options[int(key)] = float(value)
    return Layer(kind, rest[:split], rest[split:end], options, lists)


def read_weights(layers: list[Layer], data: bytes) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each convolution's weight (out, in, height, width) and bias (out), in fp32.

    Raises:
        ValueError: the file does not match the layers.
    """
    at = 0
    for layer in layers:
        if layer.kind != "Convolution":
            continue
        channels, size, count = (int(layer.options[key]) for key in (0, 1, 6))
        if int.from_bytes(data[at : at + 4], "little") != _FLOAT16:
            raise ValueError("the weights are not half precision")
        at += 4
        weight = np.frombuffer(data, "<f2", count, at).astype(np.float32)
        at += math.ceil(2 * count / 4) * 4
        bias = np.frombuffer(data, "<f4", channels, at).copy()
        at += 4 * channels
        yield torch.from_numpy(weight.reshape(channels, -1, size, size)), torch.from_numpy(bias)
    if at != len(data):
        raise ValueError(f"{len(data) - at} extra bytes follow the weights")


class Network:
    """The layers of a `.param` file, computed by torch.

    Args:
        layers: as returned by `read_layers`.
        data: contents of the `.bin` file.
        device: torch device; uses half precision on a GPU, otherwise fp32.
    """

    def __init__(self, layers: list[Layer], data: bytes, device: str) -> None:
        self._layers = layers
        self._device = device
        self._type = torch.float32 if device == "cpu" else torch.float16
        self._weights = [
            (weight.to(device, self._type), bias.to(device, self._type))
            for weight, bias in read_weights(layers, data)
        ]

    @torch.inference_mode()
    def __call__(self, image: Tensor) -> Tensor:
        """Upscales a batch (n, 3, height, width) of numbers from 0 to 1 by a factor of four."""
        weights = iter(self._weights)
        # Each blob has one reader (`Split` makes copies), so it is freed after being read.
        blobs = {"data": image.to(self._device, self._type)}
        for layer in self._layers[1:]:
            blobs_in = [blobs.pop(name) for name in layer.inputs]
            if layer.kind == "Split":
                blobs.update(dict.fromkeys(layer.outputs, blobs_in[0]))
            elif layer.kind == "Convolution":
                blobs[layer.outputs[0]] = _convolve(layer, blobs_in[0], *next(weights))
            else:
                blobs[layer.outputs[0]] = _combine(layer, blobs_in)
        return blobs["output"].float().clamp_(0, 1).cpu()


def _convolve(layer: Layer, blobs_in: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    output = functional.conv2d(blobs_in, weight, bias, padding=int(layer.options[4]))
    if 9 not in layer.options:
        return output
    return functional.leaky_relu_(output, layer.lists[10][0])


def _combine(layer: Layer, blobs_in: list[Tensor]) -> Tensor:
    if layer.kind == "Concat":
        return torch.cat(blobs_in, dim=1)
    if layer.kind == "BinaryOp" and layer.options.get(0, 0) == 0:
        return blobs_in[0] + blobs_in[1]
    if layer.kind == "Eltwise" and layer.options[0] == 1:  # a weighted sum
        first, second = layer.lists[1]
        return torch.add(blobs_in[1] * second, blobs_in[0], alpha=first)
    if layer.kind == "Interp" and layer.options[0] == _NEAREST:
        factor = (layer.options[1], layer.options[2])
        return functional.interpolate(blobs_in[0], scale_factor=factor, mode="nearest")
    raise ValueError(f"unknown layer type {layer.kind}")


def enlarge(network: Network, image: Tensor) -> Tensor:
    """Upscales an image (3, height, width) of numbers from 0 to 1, in tiles."""
    _, height, width = image.shape
    whole = torch.empty(3, height * SCALE, width * SCALE)
    for top in range(0, height, TILE_PX):
        for left in range(0, width, TILE_PX):
            above, before = min(top, OVERLAP_PX), min(left, OVERLAP_PX)
            bottom, right = min(top + TILE_PX, height), min(left + TILE_PX, width)
            tile = image[:, top - above : bottom + OVERLAP_PX, left - before : right + OVERLAP_PX]
            enlarged = network(tile[None])[0, :, above * SCALE :, before * SCALE :]
            high, wide = (bottom - top) * SCALE, (right - left) * SCALE
            whole[:, top * SCALE : bottom * SCALE, left * SCALE : right * SCALE] = enlarged[
                :, :high, :wide
            ]
    return whole


class Predictor(BasePredictor):
    """Enlarges images."""

    def setup(self) -> None:
        if not WEIGHTS.is_dir():
            raise FileNotFoundError(f"{WEIGHTS} is missing; run: make example NAME=upscale")
        layers = read_layers((WEIGHTS / "realesrgan-x4plus.param").read_text())
        data = (WEIGHTS / "realesrgan-x4plus.bin").read_bytes()
        self.network = Network(layers, data, "cuda" if torch.cuda.is_available() else "cpu")

    def predict(
        self,
        image: Path = Input(description="The image: PNG, JPEG or WebP, at most 1 megapixel."),
        scale: float = Input(
            description="Factor by which width and height grow.", default=4, ge=1, le=4
        ),
    ) -> Path:
        """Returns a PNG file. A transparent image stays transparent."""
        source = read_image(image)
        current_scope().record_metric("input_pixels", source.width * source.height)
        colors = torch.from_numpy(np.array(source.convert("RGB"))).permute(2, 0, 1) / 255
        pixels = enlarge(self.network, colors).mul_(255).round_().to(torch.uint8)
        result = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        if source.mode == "RGBA":
            result.putalpha(source.getchannel("A").resize(result.size, Image.Resampling.BICUBIC))
        if scale != SCALE:
            size = (max(1, round(source.width * scale)), max(1, round(source.height * scale)))
            result = result.resize(size, Image.Resampling.LANCZOS)
        # Only one prediction runs at a time, so the next one may overwrite this.
        path = Path(tempfile.gettempdir()) / "upscaled.png"
        result.save(path, compress_level=1)
        return path
