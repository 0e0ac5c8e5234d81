"""How an image pipeline is run on this device: decided once, from what the device can and what the catalog asks."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from shared.catalog import Model
from shared.errors import ConfigurationError

_AMPERE = (8, 0)
_VOLTA = (7, 0)
"""The first GPUs with bfloat16 matrix units, and the first that Triton generates code for."""


@dataclass(frozen=True)
class Capability:
    """What a device offers. `compute`: of a CUDA GPU, as (major, minor); (0, 0) on a CPU."""

    kind: str
    compute: tuple[int, int]
    has_triton: bool
    has_torchao: bool


def capability_of(device: torch.device) -> Capability:
    """What `device` and the packages installed offer."""
    return Capability(
        kind=device.type,
        compute=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        has_triton=importlib.util.find_spec("triton") is not None,
        has_torchao=importlib.util.find_spec("torchao") is not None,
    )


@dataclass(frozen=True)
class ImagePlan:
    """How to run the pipeline.

    `is_compiled`: UNet and VAE go through torch.compile for each of `batch_sizes` at the catalog's usual size (other
    shapes run eagerly), the VAE image by image. `is_int8`: the linear layers of the UNet's transformers in INT8.
    `is_tuned`: channels-last weights and fused query-key-value projections.
    """

    dtype: torch.dtype
    is_tuned: bool
    is_int8: bool
    is_compiled: bool
    batch_sizes: tuple[int, ...]


def plan_for(entry: Model, capability: Capability) -> ImagePlan:
    """The plan for an image model of the catalog.

    Raises:
        ConfigurationError: the entry asks for INT8, and torchao is not installed.
    """
    is_gpu = capability.kind == "cuda"
    is_int8 = entry.precision == "int8"
    if is_int8 and not capability.has_torchao:
        raise ConfigurationError(f"{entry.name}: INT8 images need torchao; install penstock[gpu]", field="precision")
    asked = entry.image.compile
    return ImagePlan(
        dtype=_dtype(entry.precision, capability),
        # Measured on a CPU: neither changes the time by more than its noise.
        is_tuned=is_gpu,
        is_int8=is_int8,
        is_compiled=asked == "always" or (asked == "auto" and is_gpu and _can_compile(capability)),
        batch_sizes=_batch_sizes(entry),
    )


def _dtype(precision: str, capability: Capability) -> torch.dtype:
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if named is not None:
        return named
    if capability.kind != "cuda":
        return torch.float32
    return torch.bfloat16 if capability.compute >= _AMPERE else torch.float16


def _can_compile(capability: Capability) -> bool:
    return capability.has_triton and capability.compute >= _VOLTA


def _batch_sizes(entry: Model) -> tuple[int, ...]:
    """Powers of two up to the largest batch of usual images that the budget lets through."""
    usual = entry.image
    largest = min(entry.batch.max_items, max(1, entry.budget // (usual.width * usual.height * usual.steps)))
    return tuple(1 << power for power in range(largest.bit_length()))
