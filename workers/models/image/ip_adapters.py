"""IP-Adapters, which add a reference image to the prompt.

Each of the UNet's cross-attention layers also attends to the reference image (Ye et al. 2023,
https://arxiv.org/abs/2308.06721). The image is encoded once, to a few tokens. Each layer attends to
these tokens with the adapter's keys and values, and adds `scale` times the result to its result for
the prompt. One UNet call can mix images with and without an adapter, different adapters, and
different reference images. Hooks on the layers add to the rows with an adapter. The results for
other rows stay bit-for-bit the same.
"""

from __future__ import annotations

import hashlib
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
from workers.models.image.plan import ImagePlan
from workers.models.loading import folder_errors

KEPT_BYTES = 64 * 1024 * 1024
"""Device memory for the cache of reference images.

In 16 bits, it holds 5,400 reference images for Stable Diffusion 1.5, or 2,000 for SDXL.
"""
_PROJECTION, _LAYERS = "image_proj.", "ip_adapter."
_KEY, _VALUE = ".to_k_ip.weight", ".to_v_ip.weight"


class IpAdapters:
    """A pipeline's IP-Adapters, by their names in the catalog.

    Args:
        pipeline: the pipeline they were trained for.

    Raises:
        ConfigurationError: the files aren't an IP-Adapter for this pipeline.
    """

    def __init__(
        self,
        files: Mapping[str, IpAdapterFiles],
        pipeline: Any,
        device: torch.device,
        plan: ImagePlan,
    ) -> None:
        self._device, self._dtype = device, plan.dtype
        self._batch: _Batch | None = None
        self._encodings = KeptEncodings(KEPT_BYTES)
        self._adapters: dict[str, _IpAdapter] = {}
        if not files:
            return
        if getattr(pipeline, "unet", None) is None:
            raise ConfigurationError(
                "image.ip_adapters: only supported by Stable Diffusion and Stable Diffusion XL "
                "models",
                field="image.ip_adapters",
            )
        loader = _Loader(pipeline.unet, device, plan.dtype)
        for name, adapter_files in files.items():
            self._adapters[name] = loader.load(f"image.ip_adapters.{name}", adapter_files)
        for number, layer in enumerate(loader.layers):
            # Adapters (LoRA) change the queries first, because their hooks run first.
            layer.to_q.register_forward_hook(self._take_queries)
            layer.to_out[0].register_forward_pre_hook(self._adding(number, layer.heads))

    def start(self, item: PreparedImage) -> IpAdapterStart | None:
        """Encodes an item's reference image, unless it is cached. None if it has no IP-Adapter."""
        if not item.ip_adapter or not item.ip_adapter_scale:
            return None
        name, seen = item.ip_adapter, item.ip_adapter_pixels
        key = name, hashlib.blake2b(seen, digest_size=16).digest()
        tokens = self._encodings.get(key)
        if tokens is None:
            adapter = self._adapters[name]
            pixels = _as_clip_takes(seen, adapter.side_px)
            tokens = adapter.tokens(pixels.to(self._device, self._dtype))
            self._encodings.keep(key, tokens)
        return IpAdapterStart(name, tokens, item.ip_adapter_scale)

    @contextmanager
    def apply(self, starts: Sequence[tuple[IpAdapterStart, int] | None]) -> Iterator[None]:
        """Within this context, the UNet computes rows with these reference images.

        Args:
            starts: one per row, with the index (0 or 1) of the row's token set.
        """
        groups: dict[str, list[tuple[int, IpAdapterStart, int]]] = {}
        for row, chosen in enumerate(starts):
            if chosen is not None:
                groups.setdefault(chosen[0].name, []).append((row, *chosen))
        self._batch = _Batch([self._rows(name, group) for name, group in groups.items()])
        try:
            yield
        finally:
            self._batch = None

    def _rows(self, name: str, group: Sequence[tuple[int, IpAdapterStart, int]]) -> _Rows:
        return _Rows(
            self._adapters[name],
            torch.tensor([at for at, _, _ in group], device=self._device),
            torch.stack([start.tokens[which] for _, start, which in group]),
            torch.tensor([start.scale for _, start, _ in group], device=self._device),
        )

    def _take_queries(self, layer: Any, inputs: Any, output: torch.Tensor) -> None:
        if self._batch is not None:
            self._batch.queries = output

    def _adding(self, number: int, heads: int) -> Any:
        def add(layer: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
            if self._batch is None or not self._batch.rows:
                return None
            return (self._batch.add_to(number, heads, inputs[0]), *inputs[1:])

        return add


@dataclass(slots=True, eq=False)
class IpAdapterStart:
    """The IP-Adapter data that an item's steps need."""

    name: str
    tokens: torch.Tensor
    """Tokens for the negative prompt, followed by tokens for the prompt, [2, tokens, width]."""
    scale: float


@dataclass(slots=True, eq=False)
class _Rows:
    """The rows of a call that use one IP-Adapter."""

    adapter: _IpAdapter
    where: torch.Tensor
    """Row indices in the call, [rows]."""
    tokens: torch.Tensor
    """[rows, tokens, width]."""
    scales: torch.Tensor
    """[rows], fp32."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A UNet call."""

    rows: Sequence[_Rows]
    queries: torch.Tensor | None = None
    """Queries of the layer being computed, [rows, pixels, inner]."""

    def add_to(self, number: int, heads: int, attended: torch.Tensor) -> torch.Tensor:
        """Returns a layer's attention output plus the reference images', [rows, pixels, inner]."""
        assert self.queries is not None, "the layer has no queries; this is a bug"
        for row in self.rows:
            keys = linear(row.tokens, row.adapter.keys[number])
            values = linear(row.tokens, row.adapter.values[number])
            seen = scaled_dot_product_attention(
                _by_head(self.queries.index_select(0, row.where), heads),
                _by_head(keys, heads),
                _by_head(values, heads),
            )
            # In fp32, because the product of a Python number and a 16-bit tensor is also computed
            # that way.
            scaled = (row.scales.view(-1, 1, 1) * seen.transpose(1, 2).flatten(2)).to(seen.dtype)
            whole = attended.index_select(0, row.where) + scaled
            attended = attended.index_copy(0, row.where, whole)
        return attended


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
