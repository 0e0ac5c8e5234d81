"""A custom model's time and memory requirements: the contents of `penstock.measured.json`.

`penstock models measure FOLDER` writes it next to the class, and `penstock deploy plan` reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError
from shared.models.class_files import ClassFile

MEASUREMENT_FILE = ClassFile(
    "penstock.measured.json",
    "measured.json",
    frozenset({"measured", "device", "batches", "sources_sha256"}),
)
CPU = "cpu"
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelMeasurement(BaseModel):
    """One class's measurements on one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    measured: str = Field(min_length=1)
    """Description of the method, machine, and date."""
    device: str = Field(min_length=1)
    """`cpu`, or the name of the GPU."""
    setup_s: Seconds
    """Seconds from process start until setup is complete."""
    batches: dict[Annotated[int, Field(gt=0)], Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Seconds until all items are done, keyed by the number of items processed together."""
    work_per_item: float | None = Field(None, gt=0)
    """Average input weight returned by the class's `work`. None if the class has no `work`."""
    peak_memory_bytes: int = Field(gt=0)
    """Maximum memory used by the class's processes, excluding GPU memory."""
    input_bytes: int = Field(ge=0)
    """Item size: the item's values as JSON, plus its files."""
    output_bytes: int = Field(ge=0)
    """Result size, measured in the same way."""
    sources_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Digest of the sources that were measured."""

    def seconds_per_item(self, max_items: int) -> float:
        """Returns the seconds per item in the largest measured batch of at most `max_items`."""
        items = max((size for size in self.batches if size <= max_items), default=min(self.batches))
        return self.batches[items] / items

    def is_of(self, gpu_type: str) -> bool:
        """Returns whether the class was measured on this catalog GPU type (`none` means a CPU)."""
        return is_device_of(self.device, gpu_type)


def is_device_of(device: str, gpu_type: str) -> bool:
    """Returns whether a device matches this GPU type from the catalog (`none` means a CPU)."""
    if gpu_type == "none" or device == CPU:
        return (gpu_type == "none") == (device == CPU)
    return set(_words(gpu_type)) <= set(_words(device))


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def read_measurement(path: Path) -> ModelMeasurement:
    """Reads a penstock.measured.json.

    Raises:
        ConfigurationError: the file is missing or invalid.
    """
    hint = f"create the file with: penstock models measure {path.parent}"
    try:
        return ModelMeasurement.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; {hint}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(f"{path}: {where}: {first['msg']}; {hint}") from error
