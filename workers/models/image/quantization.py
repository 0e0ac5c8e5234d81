"""INT8 for the linear layers of a diffusion UNet, with torchao. Imported only if a plan uses it."""

from __future__ import annotations

from typing import Any

import torch
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

_TURING = (7, 5)
"""The first GPUs with INT8 matrix units."""


def quantize_linears(unet: Any) -> None:
    """Converts the linear layers in the transformer blocks of `unet` to INT8, in place.

    Weights per channel. On GPUs with INT8 matrix units also activations, per token. The few other
    layers get one row per image (time embedding), which gains nothing and is below the 17 rows that
    CUDA's INT8 product needs.
    """
    device = unet.device
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TURING
    config = Int8DynamicActivationInt8WeightConfig() if has_units else Int8WeightOnlyConfig()
    quantize_(unet, config, filter_fn=_is_in_transformer)


def _is_in_transformer(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and ".transformer_blocks." in name
