"""Decides how an image pipeline runs, based on the device's capability and the catalog."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from shared.errors import ConfigurationError
from shared.models.catalog import Model

_AMPERE = (8, 0)
_VOLTA = (7, 0)
"""The first GPUs with bfloat16 matrix units, and the first GPUs that Triton supports."""


@dataclass(frozen=True)
class Capability:
    """The features that a device supports.

    `compute` is a CUDA GPU's compute capability, (major, minor), or (0, 0) on a CPU.
    """

    kind: str
    compute: tuple[int, int]
    has_triton: bool
    has_torchao: bool


def capability_of(device: torch.device) -> Capability:
    """Returns the features that `device` and the installed packages support."""
    return Capability(
        kind=device.type,
        compute=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        has_triton=importlib.util.find_spec("triton") is not None,
        has_torchao=importlib.util.find_spec("torchao") is not None,
    )


@dataclass(frozen=True)
class ImagePlan:
    """Determines how the pipeline runs.

    `is_compiled`: torch.compile for the UNet and VAE, for each of `batch_sizes` at the default
    image size. Other shapes run eagerly, and the VAE processes images one at a time. `is_int8`:
    INT8 for the linear layers in the UNet's transformers. `is_tuned`: channels-last weights and
    fused query-key-value projections. `has_adapters`: True if nothing may be fused, because
    adapters change the parts. `has_controls`: True if the UNet may be called with ControlNets'
    residuals. `has_ip_adapters`: True if it may be called with reference images.
    """

    dtype: torch.dtype
    is_tuned: bool
    is_int8: bool
    is_compiled: bool
    batch_sizes: tuple[int, ...]
    has_adapters: bool = False
    has_controls: bool = False
    has_ip_adapters: bool = False

    @property
    def compiled_shapes(self) -> int:
        """Maximum number of different inputs that warm-up compiles for each part."""
        # Batches with and without negative prompts, and each kind of addition.
        additions = self.has_adapters + self.has_controls + self.has_ip_adapters
        return len(self.batch_sizes) * (2 << additions)


def plan_for(entry: Model, capability: Capability) -> ImagePlan:
    """Returns the plan for an image model in the catalog.

    Raises:
        ConfigurationError: the entry requires INT8, but torchao is not installed.
    """
    is_gpu = capability.kind == "cuda"
    is_int8 = entry.precision == "int8"
    if is_int8 and not capability.has_torchao:
        raise ConfigurationError(
            f"{entry.name}: INT8 images require torchao; install penstock[gpu]", field="precision"
        )
    compile_mode = entry.image.compile_mode
    can_compile = capability.has_triton and capability.compute >= _VOLTA
    return ImagePlan(
        dtype=_dtype(entry.precision, capability),
        # On a CPU, neither makes a measurable difference.
        is_tuned=is_gpu,
        is_int8=is_int8,
        is_compiled=compile_mode == "always" or (compile_mode == "auto" and is_gpu and can_compile),
        batch_sizes=_batch_sizes(entry),
        has_adapters=entry.image.has_adapters,
        has_controls=bool(entry.image.controls),
        has_ip_adapters=bool(entry.image.ip_adapters),
    )


def _dtype(precision: str, capability: Capability) -> torch.dtype:
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if named is not None:
        return named
    if capability.kind != "cuda":
        return torch.float32
    return torch.bfloat16 if capability.compute >= _AMPERE else torch.float16


def _batch_sizes(entry: Model) -> tuple[int, ...]:
    """Returns powers of two, up to the largest batch of default-size images within the budget.

    The entry doesn't list them, because its batch limits already determine which batches can occur.
    A list could only contradict them, and would have to be changed along with them.
    """
    usual = entry.image
    largest = min(
        entry.batch.max_items, max(1, entry.budget // (usual.width * usual.height * usual.steps))
    )
    return tuple(1 << power for power in range(largest.bit_length()))
