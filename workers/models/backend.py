"""What computes an embedding: the resolved backend that workers/autotune picks and a model process runs."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.catalog import Model
from shared.errors import ConfigurationError


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend with nothing left open.

    `variant`: its name in the artifact, `graph`: its file; both empty for torch. `call_tokens`: what one call costs
    besides its tokens, in tokens, as measured on this machine; 0: not measured, a usual figure of the device is taken.
    """

    backend: Literal["torch", "onnx"] = "torch"
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    variant: str = ""
    graph: str = ""
    call_tokens: int = 0

    @property
    def name(self) -> str:
        """As logs and metrics call it."""
        return self.variant or f"{self.backend}-{self.precision}"


def unmeasured_backend(entry: Model) -> Backend:
    """The backend of `entry` where nothing was measured: torch, in the entry's precision or else fp32.

    Raises:
        ConfigurationError: the entry demands ONNX, which needs the graph of an artifact.
    """
    if entry.backend == "onnx" or entry.precision == "int8":
        raise ConfigurationError(
            f"{entry.name}: {entry.backend} {entry.precision} needs an artifact; make it with "
            f"`python -m workers.optimize {entry.name}`",
            field="backend",
        )
    return Backend(precision="fp32" if entry.precision == "auto" else entry.precision)
