"""A model's speed on one device: the contents of a `.device.json` file.

It is written by `penstock optimize MODEL --device`. `penstock deploy plan` and `penstock simulate`
read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.models.entry import Batch
from shared.models.measurement import is_device_of
from shared.models.tasks.embedding import batch_of_tokens

SUFFIX = ".device.json"


class ImageTiming(BaseModel):
    """Timing for a batch of identical images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(gt=0)
    height: int = Field(gt=0)
    steps: int = Field(gt=0)
    items: int = Field(gt=0)
    batch_s: float = Field(gt=0)
    """Seconds until all images are finished."""


class DeviceProfile(BaseModel):
    """Measurements of one model on one device. None, or an empty collection, means not measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    revision: str
    device: str = Field(min_length=1)
    """`cpu`, or the name of the GPU."""
    measured: str = Field(min_length=1)
    """Description of the method, machine, and date."""
    versions: Mapping[str, str] = {}
    """Versions of the libraries."""
    processes: int = Field(1, gt=0)
    """Number of model processes that were computing at the same time."""
    batch_tokens: int | None = Field(None, gt=0)
    """Tokens per batch, as determined by workers on this device."""
    tokens_per_s: Mapping[int, Annotated[float, Field(gt=0)]] = {}
    """Combined rate of all processes, keyed by tokens per batch."""
    images: tuple[ImageTiming, ...] = ()
    peak_memory_bytes: int | None = Field(None, gt=0)
    """Maximum memory of one process, which is GPU memory if measured on a GPU."""
    call_us: float | None = Field(None, gt=0)
    """Microseconds for a call with one short text; for a GPU, most of that time is spent on the
    host.
    """
    text_us: float | None = Field(None, gt=0)
    """Microseconds of CPU time to tokenize an average text, in a worker's I/O process."""

    def is_of(self, model: Model) -> bool:
        """Returns whether the profile has measurements of this model on its entry's GPU type."""
        is_same = (self.model, self.revision) == (model.name, model.revision)
        return is_same and is_device_of(self.device, model.gpu.type)

    def batch(self, model: Model) -> Batch:
        """Returns the batch limits on this device."""
        if self.batch_tokens is None:
            return model.usual_batch
        return batch_of_tokens(model, self.batch_tokens)

    def tokens_s(self, model: Model) -> float | None:
        """Returns the seconds per token for one process with full batches; None if not measured."""
        max_tokens = self.batch(model).max_tokens or 0
        sizes = [tokens for tokens in self.tokens_per_s if tokens <= max_tokens]
        return self.processes / self.tokens_per_s[max(sizes)] if sizes else None

    def image_s(self, model: Model) -> float | None:
        """Returns the seconds per image at the entry's default size, in full batches.

        None if not measured.
        """
        usual = (model.image.width, model.image.height, model.image.steps)
        timings = [
            timing
            for timing in self.images
            if (timing.width, timing.height, timing.steps) == usual
            and timing.items <= model.batch.max_items
        ]
        if not timings:
            return None
        largest = max(timings, key=lambda timing: timing.items)
        return largest.batch_s / largest.items


def read_profiles(path: Path) -> list[DeviceProfile]:
    """Reads a profile, or all profiles in a folder and its subfolders.

    Raises:
        ConfigurationError: there are no profiles, or one is invalid.
    """
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigurationError(f"{path}: contains no *{SUFFIX} file", field="profile")
    profiles = []
    for file in files:
        try:
            profiles.append(DeviceProfile.model_validate_json(file.read_bytes()))
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror}", field="profile") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigurationError(f"{file}: {where}: {first['msg']}", field="profile") from error
    return profiles
