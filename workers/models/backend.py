"""An embedding model's backend, chosen by workers/autotune and run by a model process."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.errors import ConfigurationError
from shared.models.catalog import Model


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A library and precision, fully resolved.

    `variant` is the variant's name in the artifact, and `graph` is its file. Both are empty for
    torch. `call_tokens` is the fixed cost of one call in tokens, as measured on this machine. If it
    is 0, it was not measured, and the device's default is used.
    """

    backend: Literal["torch", "onnx"] = "torch"
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    variant: str = ""
    graph: str = ""
    call_tokens: int = 0

    @property
    def name(self) -> str:
        return self.variant or f"{self.backend}-{self.precision}"


def choose_unmeasured_backend(entry: Model, making_command: str = "") -> Backend:
    """Returns the backend for `entry` without measuring: torch, in the entry's precision or fp32.

    Raises:
        ConfigurationError: the entry requires ONNX, which needs a graph from an artifact.
    """
    if entry.backend == "onnx" or entry.precision == "int8":
        raise ConfigurationError(
            f"{entry.name}: {entry.backend} {entry.precision} requires an artifact; create it "
            f"with `{making_command or f'penstock optimize {entry.name}'}`",
            field="backend",
        )
    assert entry.precision != "int4", "int4 is not supported for embeddings; this is a bug"
    return Backend(precision="fp32" if entry.precision == "auto" else entry.precision)
