"""Finds the GPU type of a device in infra/kubernetes/gpus.yaml, by the name of its driver.

The device decides and not the catalog: a larger type may have taken over if one is out of stock.
"""

from __future__ import annotations

import re

from shared.catalog_entry import GpuTypeName

_NAMES: tuple[tuple[str, GpuTypeName], ...] = (
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"\bA100\b.*\b80GB\b", "a100-80gb"),
    (r"\bA100\b", "a100"),
    (r"\bH100\b", "h100"),
    (r"\bRTX PRO 6000\b", "rtx-pro-6000"),
)
"""As `torch.cuda.get_device_name` has them, such as `NVIDIA A100-SXM4-40GB`."""


def gpu_type_of(device: str) -> GpuTypeName | None:
    """The type of a device with this name. None for a CPU, and for types that have no price."""
    return next((type_ for name, type_ in _NAMES if re.search(name, device)), None)
