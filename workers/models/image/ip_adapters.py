"""IP-Adapters, which add a reference image to the prompt.

Each of the UNet's cross-attention layers also attends to the reference image (Ye et al. 2023,
https://arxiv.org/abs/2308.06721). The image is encoded once, to a few tokens, from which each layer
has its own keys and values. It attends to them with the queries for the prompt, and adds `scale`
times the result to its result for the prompt.

One UNet call can mix images with and without an adapter, different adapters, and different
reference images. Hooks on the layers add to every row. For rows without an adapter, they add zero,
so the results stay bit-for-bit the same. The rows' keys and values are copied to fixed memory,
which compiled code and CUDA graphs read.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.embeddings import ImageProjection
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import CLIPVisionModelWithProjection
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from shared.errors import ConfigurationError
from workers.models.base import PreparedImage
from workers.models.image.folders_beside import IpAdapterFiles
from workers.models.image.kept_encodings import KeptEncodings
from workers.models.loading import folder_errors

KEPT_BYTES = 64 * 1024 * 1024
"""Device memory for the cache of reference images.

In 16 bits, it holds 5,400 reference images for Stable Diffusion 1.5, or 2,000 for SDXL.
"""
_PROJECTION, _LAYERS = "image_proj.", "ip_adapter."
_KEY, _VALUE = ".to_k_ip.weight", ".to_v_ip.weight"

log = logging.getLogger(__name__)


class IpAdapters:
    """A pipeline's IP-Adapters, by their names in the catalog.

    Args:
        pipeline: the pipeline they were trained for.
        compiled_rows: maximum rows per call to the compiled UNet. 0 if it isn't compiled.

    Raises:
        ConfigurationError: the files aren't an IP-Adapter for this pipeline.
    """

    def __init__(
        self,
        files: Mapping[str, IpAdapterFiles],
        pipeline: Any,
        device: torch.device,
        dtype: torch.dtype,
        compiled_rows: int = 0,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._encodings = KeptEncodings(KEPT_BYTES)
        self._adapters: dict[str, _IpAdapter] = {}
        self._call: _ReferenceRows | None = None
        """The rows of the current UNet call, if any of them has a reference image."""
        self._queries: torch.Tensor | None = None
        """Queries of the layer being computed, [rows, pixels, inner]."""
        self._numbers = itertools.count(1)
        if not files:
            return
        if getattr(pipeline, "unet", None) is None:
            raise ConfigurationError(
                "image.ip_adapters: only supported by Stable Diffusion and Stable Diffusion XL "
                "models",
                field="image.ip_adapters",
            )
        loader = _Loader(pipeline.unet, device, dtype)
        for name, adapter_files in files.items():
            self._adapters[name] = loader.load(f"image.ip_adapters.{name}", adapter_files)
        self._layers = loader.layers
        self._compiled = self._make_room(compiled_rows)
        self._eager = self._make_room(0)
        if compiled_rows:
            log.info(
                "room for IP-Adapters in compiled code", extra={"bytes": self._compiled.nbytes}
            )
        for number, layer in enumerate(self._layers):
            # Adapters (LoRA) change the queries first, because their hooks run first.
            layer.to_q.register_forward_hook(self._take_queries)
            layer.to_out[0].register_forward_pre_hook(self._adding(number, layer.heads))

    @property
    def sides_px(self) -> dict[str, int]:
        """The side of the square that each adapter's image encoder reads."""
        return {name: adapter.side_px for name, adapter in self._adapters.items()}

    def start(self, item: PreparedImage) -> IpAdapterStart | None:
        """Encodes an item's reference image, unless it is cached. None if it has no IP-Adapter."""
        if not item.ip_adapter or not item.ip_adapter_scale:
            return None
        name, seen = item.ip_adapter, item.ip_adapter_pixels
        adapter = self._adapters[name]
        key = name, hashlib.blake2b(seen, digest_size=16).digest()
        tokens = self._encodings.get(key)
        if tokens is None:
            pixels = _as_clip_takes(seen, adapter.side_px)
            tokens = adapter.tokens(pixels.to(self._device, self._dtype))
            self._encodings.keep(key, tokens)
        return IpAdapterStart(
            next(self._numbers),
            [linear(tokens, weight) for weight in adapter.keys],
            [linear(tokens, weight) for weight in adapter.values],
            item.ip_adapter_scale,
        )

    @contextmanager
    def apply(self, rows: Sequence[ReferenceRow]) -> Iterator[None]:
        """Within this context, the UNet computes rows with these reference images."""
        if len(rows) <= self._compiled.capacity:
            self._call = self._compiled
        else:
            if len(rows) > self._eager.capacity:
                self._eager = self._make_room(len(rows))
            self._call = self._eager
        self._call.place(rows)
        try:
            yield
        finally:
            self._call = None

    def _make_room(self, rows: int) -> _ReferenceRows:
        tokens = [adapter.token_count for adapter in self._adapters.values()]
        with torch.inference_mode(False):  # inference tensors can't be moved to host memory
            return _ReferenceRows(rows, self._layers, tokens, self._device, self._dtype)

    def _take_queries(self, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if self._call is not None:
            self._queries = output

    def _adding(self, number: int, heads: int) -> Any:
        def add(layer: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
            if self._call is None:
                return None
            assert self._queries is not None, "the layer has no queries; this is a bug"
            seen = self._call.attend(number, heads, self._queries)
            self._queries = None  # otherwise, compiled code would return it as an output
            return (inputs[0] + seen, *inputs[1:])

        return add


@dataclass(slots=True, eq=False)
class IpAdapterStart:
    """The IP-Adapter data that an item's steps need.

    `number` is different for each item. `keys` and `values` have one tensor per layer, [2, tokens,
    inner]: for the row with the negative prompt, followed by the row with the prompt.
    """

    number: int
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    scale: float


ReferenceRow = tuple[IpAdapterStart, int] | None
"""The reference image of a row in a UNet call, with the index (0 or 1) of its keys and values."""


class _ReferenceRows(torch.nn.Module):
    """Memory for the reference images of the rows in a UNet call.

    As parameters and buffers, it moves along with the model, and compiled code may rely on its
    address. It holds up to `capacity` rows, with as many tokens as the adapter with the most.

    Args:
        tokens: each adapter's number of tokens.
    """

    def __init__(
        self,
        capacity: int,
        layers: Sequence[Any],
        tokens: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.capacity = capacity
        most = max(tokens)
        shapes = [(capacity, most, layer.inner_dim) for layer in layers]
        self._keys, self._values = (
            torch.nn.ParameterList(
                torch.zeros(shape, device=device, dtype=dtype) for shape in shapes
            )
            for _ in range(2)
        )
        self._scales = torch.nn.Buffer(torch.zeros(capacity, 1, 1, device=device))
        mask = torch.zeros(capacity, 1, 1, most, device=device, dtype=dtype)
        self._mask = torch.nn.Buffer(mask) if len(set(tokens)) > 1 else None
        """0, or minus infinity for tokens that an adapter doesn't have."""
        self._placed: dict[int, tuple[int, int] | None] = {}
        """Each row's item number and index, from the last call."""
        self.requires_grad_(False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parameters())

    def place(self, rows: Sequence[ReferenceRow]) -> None:
        """Copies the rows' keys and values, unless they are there from an earlier step."""
        for at, row in enumerate(rows):
            which = None if row is None else (row[0].number, row[1])
            if at in self._placed and self._placed[at] == which:
                continue
            self._placed.pop(at, None)  # the device may run out of memory while it is copied
            self._place(at, row)
            self._placed[at] = which

    def _place(self, at: int, row: ReferenceRow) -> None:
        room = [tensor[at] for tensor in self.parameters()]
        torch._foreach_zero_(room)
        self._scales[at] = 0.0 if row is None else row[0].scale
        count = len(room[0])
        if row is not None:
            start, which = row
            count = start.keys[0].shape[1]
            sources = [tensor[which] for tensor in (*start.keys, *start.values)]
            torch._foreach_copy_([tensor[:count] for tensor in room], sources)
        if self._mask is not None:
            self._mask[at, ..., :count] = 0.0
            self._mask[at, ..., count:] = float("-inf")

    def attend(self, number: int, heads: int, queries: torch.Tensor) -> torch.Tensor:
        """Returns what a layer sees in the reference images, [rows, pixels, inner].

        Args:
            queries: [rows, pixels, inner].
        """
        rows = len(queries)
        seen = scaled_dot_product_attention(
            _by_head(queries, heads),
            _by_head(self._keys[number][:rows], heads),
            _by_head(self._values[number][:rows], heads),
            None if self._mask is None else self._mask[:rows],
        )
        # In fp32, because the product of a Python number and a 16-bit tensor is also computed that
        # way.
        return (self._scales[:rows] * seen.transpose(1, 2).flatten(2)).to(seen.dtype)


def _by_head(tokens: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshapes [rows, tokens, inner] to [rows, heads, tokens, inner / heads]."""
    return tokens.view(len(tokens), -1, heads, tokens.shape[-1] // heads).transpose(1, 2)


def _as_clip_takes(seen: bytes, side_px: int) -> torch.Tensor:
    """Preprocesses a square of pixels like CLIP's image processor. Returns [1, 3, side, side]."""
    pixels = torch.frombuffer(bytearray(seen), dtype=torch.uint8)
    shaped = pixels.view(1, side_px, side_px, 3).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor(OPENAI_CLIP_MEAN), torch.tensor(OPENAI_CLIP_STD)
    return (shaped - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)


def _cross_attentions(unet: Any) -> list[Any]:
    """Returns the layers that attend to the prompt, in the order in which files number them."""
    names = [name for name in unet.attn_processors if not name.endswith("attn1.processor")]
    return [unet.get_submodule(name.removesuffix(".processor")) for name in names]


class _IpAdapter(torch.nn.Module):
    """A loaded IP-Adapter. `keys` and `values` have one [inner, width] tensor per layer."""

    def __init__(
        self,
        encoder: torch.nn.Module,
        projection: torch.nn.Module,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        side_px: int,
    ) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection
        self.keys = torch.nn.ParameterList(keys)
        self.values = torch.nn.ParameterList(values)
        self.side_px = side_px
        self.token_count = 0
        """Number of tokens for an image, once known."""
        self.requires_grad_(False)

    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the tokens without an image and the image's tokens, [2, tokens, width].

        `pixels`: CLIP input, [1, 3, side, side].
        """
        if isinstance(self.projection, ImageProjection):
            seen = self.encoder(pixels).image_embeds
            both = torch.cat([torch.zeros_like(seen), seen])
        else:
            blank = torch.cat([torch.zeros_like(pixels), pixels])
            both = self.encoder(blank, output_hidden_states=True).hidden_states[-2]
        tokens: torch.Tensor = self.projection(both)
        return tokens


class _WrongFileError(Exception):
    """The IP-Adapter file can't be used. The message contains the reason."""


class _Loader:
    """Loads a UNet's IP-Adapters. Adapters with the same image encoder share it."""

    def __init__(self, unet: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.layers = _cross_attentions(unet)
        self._unet, self._device, self._dtype = unet, device, dtype
        self._encoders: dict[Path, torch.nn.Module] = {}

    def load(self, field: str, files: IpAdapterFiles) -> _IpAdapter:
        """Loads one IP-Adapter.

        Raises:
            ConfigurationError: the files aren't an IP-Adapter for this UNet. The message names
                `field`.
            OutOfMemory: the device has too little memory.
        """
        reason = f"{field}: {files.weights}"
        with folder_errors(f"{reason} does not fit {files.encoder}", field):
            try:
                adapter = self._assemble(files)
                pixels = torch.zeros(1, 3, files.side_px, files.side_px)
                with torch.inference_mode():
                    tokens = adapter.tokens(pixels.to(self._device, self._dtype))
                adapter.token_count = tokens.shape[1]
                width, wanted = tokens.shape[-1], adapter.keys[0].shape[1]
                if width != wanted:
                    raise _WrongFileError(f"its tokens have width {width}; expected {wanted}")
            except _WrongFileError as error:
                raise ConfigurationError(f"{reason}: {error}", field=field) from error
        return adapter

    def _assemble(self, files: IpAdapterFiles) -> _IpAdapter:
        projection, own = _read(files)
        keys, values = _by_layer(own, self.layers)
        encoder = self._encoders.get(files.encoder)
        if encoder is None:
            encoder = self._encoders[files.encoder] = CLIPVisionModelWithProjection.from_pretrained(
                files.encoder, local_files_only=True, use_safetensors=True, dtype=self._dtype
            )
        # diffusers knows the names used in each kind of file.
        image_projection = self._unet._convert_ip_adapter_image_proj_to_diffusers(
            projection, low_cpu_mem_usage=False
        )
        adapter = _IpAdapter(encoder, image_projection, keys, values, files.side_px)
        return adapter.to(self._device, self._dtype).eval()


Tensors = dict[str, torch.Tensor]


def _read(files: IpAdapterFiles) -> tuple[Tensors, Tensors]:
    """Returns the projection's tensors and the layers' tensors."""
    with files.weights.open("rb") as stream:
        digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    if files.digest not in (None, digest):
        raise _WrongFileError(f"its digest is {digest}; expected {files.digest}")
    try:
        tensors = load_file(files.weights)
    except SafetensorError as error:
        raise _WrongFileError(f"it is not valid safetensors: {error}") from error
    parts: list[Tensors] = [
        {
            name.removeprefix(start): tensor
            for name, tensor in tensors.items()
            if name.startswith(start)
        }
        for start in (_PROJECTION, _LAYERS)
    ]
    projection, own = parts
    if not projection or not own or len(projection) + len(own) < len(tensors):
        raise _WrongFileError(f"an IP-Adapter must have only {_PROJECTION}… and {_LAYERS}…")
    is_of_images = "proj.weight" in projection or "proj.3.weight" in projection
    if "perceiver_resampler.proj_in.weight" in projection or (
        "norm.weight" in projection and not is_of_images
    ):
        raise _WrongFileError(
            "FaceID is not supported because it requires detecting faces in the image"
        )
    return projection, own


def _by_layer(own: Tensors, layers: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns each layer's keys and values."""
    # The numbering also includes layers that attend to the image itself.
    names = [str(2 * number + 1) for number in range(len(layers))]
    known = {name + kind for name in names for kind in (_KEY, _VALUE)}
    if other := sorted(own.keys() ^ known):
        raise _WrongFileError(
            f"it was trained for a different model: {other[0]} is missing from one of the "
            f"two; this model has {len(layers)} layers"
        )
    for name, layer in zip(names, layers, strict=True):
        wanted = (layer.inner_dim, layer.cross_attention_dim)
        for kind in (_KEY, _VALUE):
            if (shape := tuple(own[name + kind].shape)) != wanted:
                raise _WrongFileError(
                    f"it was trained for a different model: {name}{kind} is {shape}; expected "
                    f"{wanted}"
                )
    return [own[name + _KEY] for name in names], [own[name + _VALUE] for name in names]
