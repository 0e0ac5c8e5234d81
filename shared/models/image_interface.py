"""An image model's tasks and fields: the file named in the entry's `image.interface`.

`penstock models check NAME` creates it from the model's pipeline. The API has neither the weights
nor diffusers, so it reads this file. A worker whose pipeline does not match the file refuses to
start.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError

ImageMode = Literal["text", "image", "mask"]
OPTIONS = ("negative_prompt", "guidance_scale", "strength", "clip_skip", "guidance_rescale")
"""Request fields that a pipeline may not support."""
MAX_BYTES = 16 * 1024
_MODES_OF_FIELD: dict[str, frozenset[ImageMode]] = {
    "image": frozenset({"image", "mask"}),
    "mask": frozenset({"mask"}),
    "mask_blur": frozenset({"mask"}),
    "padding": frozenset({"mask"}),
}
_ALIASES = {"prompt_strength": "strength"}
_NOUNS: dict[ImageMode, str] = {
    "text": "from text",
    "image": "from an image",
    "mask": "within the mask of an image",
}


class ImageUsuals(BaseModel):
    """A pipeline's defaults, which an entry may override. Named as in the entry."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(gt=0)
    height: int = Field(gt=0)
    steps: int = Field(gt=0)
    guidance_scale: float = Field(ge=0)
    scheduler: str
    multiple: int = Field(gt=0)


class ImageInterface(BaseModel):
    """A pipeline's tasks and fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pipeline: str
    """Name of the pipeline's class in diffusers."""
    tasks: tuple[ImageMode, ...] = Field(min_length=1)
    fields: tuple[str, ...]
    """The OPTIONS that the pipeline accepts."""
    schedulers: tuple[str, ...] = Field(min_length=1)
    defaults: ImageUsuals

    @property
    def as_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"

    def accepts(self, field: str) -> bool:
        """Returns whether requests may include a field.

        Fields that every pipeline supports are always accepted.
        """
        field = _ALIASES.get(field, field)
        if (modes := _MODES_OF_FIELD.get(field)) is not None:
            return not modes.isdisjoint(self.tasks)
        return field not in OPTIONS or field in self.fields

    def difference(self, other: ImageInterface) -> str:
        """Returns the first difference from another interface. Empty if they are equal.

        Order is not compared, and neither are defaults, which only the entry has.
        """
        for name in ("pipeline", "tasks", "fields", "schedulers"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its and (isinstance(mine, str) or set(mine) != set(its)):
                return f"{name}: {_show(mine)} in the file, {_show(its)} in the pipeline"
        return ""


def refuse_mode(mode: ImageMode, known: Collection[ImageMode]) -> str:
    """Returns the reason a model with these tasks can't draw in this mode. Empty if it can."""
    if mode in known:
        return ""
    return f"this model only draws {' or '.join(_NOUNS[name] for name in known)}"


def _show(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def read_image_interface(path: Path, model: str) -> ImageInterface:
    """Reads the file named in a model's entry.

    Raises:
        ConfigurationError: the file is missing or invalid.
    """
    hint = (
        f"create the file with: penstock models check {model}; if only the catalog is "
        "mounted here, replace the path with the file's content"
    )
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = f"image.interface: {path}: {error.strerror}; {hint}"
        raise ConfigurationError(reason, field="image.interface") from error
    try:
        if len(data) > MAX_BYTES:
            raise ConfigurationError(f"must be at most {MAX_BYTES} bytes, got {len(data)}")
        return ImageInterface.model_validate_json(data)
    except ConfigurationError as error:
        reason = error.message
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        reason = f"{where}: {first['msg']}"
    raise ConfigurationError(f"image.interface: {path}: {reason}; {hint}", field="image.interface")
