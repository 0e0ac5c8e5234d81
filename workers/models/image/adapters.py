"""Reads adapters (LoRA) for image models: safetensors files, checked before they are used.

Layers may be named as in diffusers, PEFT, or kohya's scripts. diffusers converts the names, as its
`load_lora_weights` does. A layer's factor, alpha / rank, is folded into its second projection.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import diffusers.utils.state_dict_utils as formats
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from shared.errors import BadInput, ConfigurationError, ModelFailed, PenstockError, Unavailable
from workers.models.image.low_rank import Layers, LowRankModule, LowRankPair

FIELD = "lora_weights"
PARTS = ("unet", "text_encoder", "text_encoder_2")
"""The pipeline parts that adapters change, with their diffusers names."""
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 16
"""Maximum number of tensors per model layer. Two weights and an alpha are typical. diffusers' name
conversion takes quadratic time, so a header full of names could take half an hour, with every step
waiting for it.
"""
MAX_PATTERNS = 4096
"""Maximum number of alpha patterns in the PEFT settings. Each pattern is compared with every layer.
"""
MAX_SETTINGS_CHARS = 1024 * 1024
"""Maximum length of the PEFT settings, in characters. Each pattern is copied once per layer."""
MAX_DIMENSIONS = 8
"""Maximum dimensions per tensor.

Weights have at most four dimensions. Torch itself raises an error above 64 dimensions.
"""
MAX_ALPHA = sys.float_info.max
"""Maximum alpha. JSON allows integers that don't fit in a float."""
_METADATA = "lora_adapter_metadata"
"""Key of the PEFT settings in a file saved by diffusers."""
_REFUSED = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "a core tensor (CP decomposition)",
    ".diff": "whole differences of weights",
}
"""Name parts that mark something other than plain low-rank layers, with the kind they mark.
"""


_FORMAT = "its file is not safetensors, which is the only supported format"
_MAX_REASON_CHARS = 200
_TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8")
"""Supported number types, by the names used for them in headers. Other types have no torch dtype,
or make no sense as weights.
"""
_TEXT_LAYERS = {
    "to_q_lora": "q_proj",
    "to_k_lora": "k_proj",
    "to_v_lora": "v_proj",
    "to_out_lora": "out_proj",
}
_UNET_LAYERS = {
    "to_q_lora": "to_q",
    "to_k_lora": "to_k",
    "to_v_lora": "to_v",
    "to_out_lora": "to_out.0",
}
"""Older names for text encoder layers, and for attention in UNets."""


class WrongAdapter(Exception):
    """The file can't be used. The message contains the adapter's name and the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter whose tensors are views of a single tensor, which is copied between devices."""

    flat: torch.Tensor
    parts: Mapping[str, Layers]
    """Each part's layers, keyed by the names in PARTS."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, which is the same on every device."""
        return self.flat.nbytes

    def on(self, device: torch.device) -> LoadedAdapter:
        """Returns the same adapter on a device."""
        flat = self.flat.to(device)
        return self if flat is self.flat else LoadedAdapter(flat, _views(flat, self.parts))


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter file and its required properties.

    `name`: the name in the catalog, or the digest. `find`: returns the file, after downloading it
    if necessary. `digest`: the file's expected digest, or None to accept any file. `is_callers`:
    True if a caller specified the adapter by URL.
    """

    name: str
    find: Callable[[], Path]
    digest: str | None
    max_rank: int
    is_callers: bool = False

    def make_internal_error(self, reason: str, detail: str = "") -> ModelFailed:
        """Returns an internal error.

        Callers see the name and the reason; the log also contains the details.
        """
        public = f"adapter {self.name!r}: {reason}"
        return ModelFailed(f"{public} ({detail})" if detail else public, field=FIELD, public=public)

    def make_refusal(self, reason: str) -> PenstockError:
        """Returns the error for a file that can't be used."""
        if not self.is_callers:
            return self.make_internal_error(reason)
        return BadInput(f"{FIELD}: the file {self.name}: {reason}", field=FIELD)


def read_adapter(
    adapter: AdapterFile,
    pipeline: Any,
    modules: Mapping[str, LowRankModule],
    limit_bytes: int,
) -> LoadedAdapter:
    """Reads an adapter into memory, in the UNet's dtype. This may take a long time.

    Args:
        pipeline: diffusers pipeline, whose class knows the formats.
        modules: the parts of the pipeline that have layers, keyed by name.
        limit_bytes: maximum size of the adapter's layers.

    Raises:
        ModelFailed: the file is missing or can't be used. The message names the adapter and the
            reason.
        BadInput: a caller's file can't be used. The message includes the reason.
    """
    file, unet = _find_file(adapter), pipeline.unet
    try:
        with file.open("rb") as stream:
            _check_digest(stream, adapter)
            numbers, metadata = _read_header(stream, modules)
            if (needed := numbers * unet.dtype.itemsize) > limit_bytes:
                raise WrongAdapter(
                    f"it takes {needed} bytes in memory, which exceeds image.adapter_memory_bytes "
                    f"({limit_bytes})"
                )
            stream.seek(0)
            tensors = load(stream.read())
        state, alphas = _convert(tensors, pipeline)
        settings = _read_settings(metadata)
        layers = _layers(state, alphas, settings, modules, adapter.max_rank)
        return _pack_layers(layers, unet.dtype)
    except WrongAdapter as error:
        raise adapter.make_refusal(str(error)) from error
    except OSError as error:
        raise adapter.make_internal_error(f"failed to read its file: {error.strerror}") from error


def _find_file(adapter: AdapterFile) -> Path:
    try:
        return adapter.find()
    except (ConfigurationError, BadInput) as error:
        reason = "its weights are missing from this worker"
        raise adapter.make_internal_error(reason, error.message) from error
    except Unavailable as error:
        raise adapter.make_internal_error(
            "its weights are unreachable; try again", error.message
        ) from error


def _check_digest(file: BufferedReader, adapter: AdapterFile) -> None:
    if adapter.digest is None:
        return
    digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    file.seek(0)
    if digest == adapter.digest:
        return
    if not adapter.is_callers:
        raise WrongAdapter(f"its file has the digest {digest}; expected {adapter.digest}")
    # The API fetched other bytes, so the caller is not to blame. The next attempt creates a new
    # copy.
    Path(file.name).unlink(missing_ok=True)
    raise adapter.make_internal_error("its copy on this worker is damaged; try again")


def _read_header(
    file: BufferedReader, modules: Mapping[str, LowRankModule]
) -> tuple[int, Mapping[str, str]]:
    """Reads a file's header, which the safetensors library checks against the file's length.

    Returns:
        Total number of elements in all tensors, and the metadata.

    Raises:
        WrongAdapter: the file is not in safetensors format, it has too many tensors, or some
            tensors are unsupported.
    """
    if not 2 <= int.from_bytes(file.read(8), "little") <= MAX_HEADER_BYTES:
        raise WrongAdapter(_FORMAT)
    try:
        with safe_open(file.name, "pt") as tensor_file:
            names = tensor_file.keys()
            layers = sum(len(module.layers) for module in modules.values())
            if len(names) > MAX_TENSORS * layers:
                raise WrongAdapter(
                    f"it has {len(names)} tensors, which exceeds the maximum of "
                    f"{MAX_TENSORS * layers} for this model's {layers} layers"
                )
            numbers = sum(_count_numbers(name, tensor_file.get_slice(name)) for name in names)
            return numbers, tensor_file.metadata() or {}
    except SafetensorError as error:
        raise WrongAdapter(f"{_FORMAT} ({str(error)[:_MAX_REASON_CHARS]})") from error


def _count_numbers(name: str, tensor: Any) -> int:
    """Returns the number of elements in a tensor whose shape the library has checked."""
    shape, kind = tensor.get_shape(), tensor.get_dtype()
    if len(shape) > MAX_DIMENSIONS:
        raise WrongAdapter(
            f"{name} has {len(shape)} dimensions, which exceeds the maximum of {MAX_DIMENSIONS}"
        )
    if kind not in _TYPES:
        raise WrongAdapter(f"{name} has the unsupported data type {kind}; use {', '.join(_TYPES)}")
    return math.prod(shape)


def _read_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the PEFT settings in a header, keyed by `PART.NAME`. Empty if there are none."""
    text = metadata.get(_METADATA, "{}")
    if len(text) > MAX_SETTINGS_CHARS:
        raise WrongAdapter(
            f"its file's {_METADATA} has {len(text)} characters, which exceeds the maximum "
            f"of {MAX_SETTINGS_CHARS}"
        )
    try:
        known = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongAdapter(f"its file's {_METADATA} is not valid JSON") from error
    return known if isinstance(known, dict) else {}


State = dict[str, torch.Tensor]


def _convert(tensors: State, pipeline: Any) -> tuple[State, Mapping[str, float]]:
    """Returns the tensors under diffusers' names, along with the layers' alphas."""
    for name in tensors:
        for part, kind in _REFUSED.items():
            if part in name:
                raise WrongAdapter(f"it has {kind} ({name}), but only plain LoRA is supported")
    try:
        state, alphas = pipeline.lora_state_dict(tensors, unet_config=pipeline.unet.config)
    except Exception as error:
        # The boundary with diffusers, which raises various errors for unknown names.
        raise WrongAdapter(f"it has unknown layer names: {str(error)[:200]}") from error
    return state, alphas or {}


def _layers(
    state: State,
    alphas: Mapping[str, float],
    settings: Mapping[str, Any],
    modules: Mapping[str, LowRankModule],
    max_rank: int,
) -> dict[str, dict[str, LowRankPair]]:
    unknown = [name for name in state if not name.startswith(tuple(f"{part}." for part in modules))]
    if unknown:
        raise WrongAdapter(f"it has {unknown[0]}, which this model does not have")
    layers = {}
    for part, module in modules.items():
        own = {
            name.removeprefix(f"{part}."): tensor
            for name, tensor in state.items()
            if name.startswith(f"{part}.")
        }
        if own:
            factor = _Scaling(part, alphas, settings)
            layers[part] = dict(_layers_of(part, own, module, factor, max_rank))
    if not layers:
        raise WrongAdapter("it has no layers")
    return layers


def _layers_of(
    part: str, own: State, module: LowRankModule, factor: _Scaling, max_rank: int
) -> Iterator[tuple[str, LowRankPair]]:
    own = _as_peft(part, own, module)
    for name in dict.fromkeys(name.rpartition(".lora_")[0] for name in own):
        down, up = (own.pop(f"{name}.lora_{side}.weight", None) for side in "AB")
        layer = module.layers.get(name)
        if layer is None:
            raise WrongAdapter(f"it changes {part}.{name}, which this model does not have")
        if down is None or up is None:
            raise WrongAdapter(f"{part}.{name} must have both weights of a low-rank layer")
        _check_shapes(f"{part}.{name}", layer, down, up, max_rank)
        rank = len(down)
        yield name, LowRankPair(down, up.reshape(len(up), rank).float() * factor.of(name, rank))
    if own:
        raise WrongAdapter(f"{part}.{next(iter(own))} is not a weight of a low-rank layer")


def _as_peft(part: str, own: State, module: LowRankModule) -> State:
    """Returns a part's tensors under PEFT's names: LAYER.lora_A.weight and LAYER.lora_B.weight."""
    try:
        if part == "unet":
            is_named = "lora_A" in next(iter(own))
            return own if is_named else formats.convert_unet_state_dict_to_peft(own)
        # If no type is given, diffusers recognizes the older format by one particular layer, which
        # some files lack.
        is_old = any(old in name for name in own for old in _TEXT_LAYERS)
        kind = formats.StateDictType.DIFFUSERS_OLD if is_old else None
        own = formats.convert_state_dict_to_diffusers(own, original_type=kind)
        own = formats.convert_state_dict_to_peft(own)
    except Exception as error:
        # Same as above.
        raise WrongAdapter(f"its {part} has unknown layer names: {error}") from error
    # transformers 5 dropped this level from CLIPTextModel but kept it in the class with a
    # projection.
    if not any(name.startswith("text_model.") for name in module.layers):
        return {name.removeprefix("text_model."): tensor for name, tensor in own.items()}
    return own


def _check_shapes(
    name: str, layer: Any, down: torch.Tensor, up: torch.Tensor, max_rank: int
) -> None:
    """Validates a layer's two weights.

    Raises:
        WrongAdapter: they don't match the layer or each other, or their rank is too high.
    """
    rank = len(down) if down.ndim else 0
    expected: list[tuple[int, ...]]
    if isinstance(layer, torch.nn.Linear):
        expected = [(rank, layer.in_features), (layer.out_features, rank)]
    else:
        kernel = (layer.in_channels // layer.groups, *layer.kernel_size)
        expected = [(rank, *kernel), (layer.out_channels, rank, 1, 1)]
    shapes = [tuple(down.shape), tuple(up.shape)]
    if not rank or shapes != expected or getattr(layer, "groups", 1) != 1:
        raise WrongAdapter(f"{name} has weights of {shapes}, but this model requires {expected}")
    if rank > max_rank:
        raise WrongAdapter(f"{name} has rank {rank}, which exceeds max_rank ({max_rank})")


class _Scaling:
    """The alpha / rank factors of one part's layers.

    Args:
        alphas: alpha values from kohya files, keyed by PART.LAYER.alpha.
        settings: PEFT settings, with keys like PART.NAME.
    """

    def __init__(self, part: str, alphas: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        own = (name for name in alphas if name.startswith(f"{part}."))
        self._alphas = {_layer_of(part, name): alphas[name] for name in own}
        self._settings = {
            name.removeprefix(f"{part}."): value
            for name, value in settings.items()
            if name.startswith(f"{part}.")
        }
        for name in ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication"):
            if self._settings.get(name):
                raise WrongAdapter(f"it has {name}, but only plain LoRA is supported")

    def of(self, name: str, rank: int) -> float:
        """Returns a layer's alpha / rank factor, which is 1 if the file doesn't specify one."""
        plain = name.removeprefix("text_model.")
        alpha: Any = self._alphas.get(plain, float(rank))
        if self._settings:
            alpha = self._settings.get("lora_alpha", rank)
            patterns = self._settings.get("alpha_pattern") or {}
            if not isinstance(patterns, Mapping) or len(patterns) > MAX_PATTERNS:
                raise WrongAdapter(
                    f"its settings' alpha_pattern must be an object with at most {MAX_PATTERNS} "
                    "patterns"
                )
            for pattern, other in patterns.items():
                if f".{name}".endswith(f".{pattern.removeprefix('^')}"):
                    alpha = other
        if not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
            raise WrongAdapter(f"{name} has no finite alpha")
        root = math.sqrt(rank) if self._settings.get("use_rslora") else rank
        return float(alpha) / root


def _layer_of(part: str, alpha_name: str) -> str:
    """Returns the layer that an alpha belongs to, as named by diffusers' conversion."""
    name = alpha_name.removeprefix(f"{part}.").removesuffix(".alpha").removeprefix("text_model.")
    name = name.partition(".down.")[0].removesuffix(".lora_linear_layer")
    head, _, last = name.rpartition(".")
    if part == "unet":
        return f"{head.removesuffix('.processor')}.{_UNET_LAYERS.get(last, last)}"
    return f"{head}.{_TEXT_LAYERS.get(last, last)}"


def _pack_layers(layers: Mapping[str, Layers], dtype: torch.dtype) -> LoadedAdapter:
    every = [
        tensor for of_part in layers.values() for pair in of_part.values() for tensor in _both(pair)
    ]
    flat = torch.empty(sum(tensor.numel() for tensor in every), dtype=dtype)
    torch.cat([tensor.reshape(-1).to(dtype) for tensor in every], out=flat)
    # Such a number would turn the image black or corrupt other rows in its batch.
    if not torch.isfinite(flat).all():
        raise WrongAdapter(f"it has numbers that are not finite in {dtype}")
    if torch.cuda.is_available():
        flat = flat.pin_memory()
    return LoadedAdapter(flat, _views(flat, layers))


def _views(flat: torch.Tensor, like: Mapping[str, Layers]) -> dict[str, Layers]:
    """Returns views of `flat` shaped like the layers in `like`."""
    at = 0

    def next_one(shape: torch.Size) -> torch.Tensor:
        nonlocal at
        begin, at = at, at + math.prod(shape)
        return flat[begin:at].view(shape)

    return {
        part: {
            name: LowRankPair(*(next_one(tensor.shape) for tensor in _both(own)))
            for name, own in of.items()
        }
        for part, of in like.items()
    }


def _both(pair: LowRankPair) -> tuple[torch.Tensor, torch.Tensor]:
    return pair.down, pair.up
