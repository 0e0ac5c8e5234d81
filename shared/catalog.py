"""The catalog (`models.yaml`): what is served; read by every process at start, a wrong entry is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.errors import ConfigurationError, UnknownModel

Positive = Annotated[int, Field(gt=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Batch(_Entry):
    """What one batch may hold: the budget of the task (tokens or pixel-steps) and a bound on items."""

    max_tokens: Positive | None = None
    max_pixel_steps: Positive | None = None
    max_items: Positive = 64


LONGEST_DEADLINE_S = 86_400
"""No model, and no caller, asks for more."""


class Deadline(_Entry):
    """Seconds from receipt to answer: the default, and the longest that a caller may ask for."""

    default_s: float = Field(30.0, gt=0, le=LONGEST_DEADLINE_S)
    longest_s: float = Field(300.0, gt=0, le=LONGEST_DEADLINE_S)


class Cache(_Entry):
    """How long results are kept (0: never), and who may get them.

    `tenant`: who sent the same before. `global`: everybody, and then the answer tells one tenant (by `x-penstock-cache`
    and by its time) whether another sent the same; for models whose inputs are no secrets.
    """

    ttl_s: int = Field(86400, ge=0)
    scope: Literal["global", "tenant"] = "tenant"


class Gpu(_Entry):
    """The GPU type a worker asks for and how many workers share one of them in time."""

    type: Literal["l4", "a100", "none"] = "none"
    share: int = Field(1, ge=1, le=48)


class Replicas(_Entry):
    """Bounds of the autoscaler."""

    min: int = Field(0, ge=0)
    max: int = Field(10, ge=1)


class Price(_Entry):
    """What an item is billed at, once it was delivered."""

    per_million_tokens_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    per_million_pixel_steps_usd: float = Field(0.0, ge=0, allow_inf_nan=False)
    cached_share: float = Field(0.0, ge=0, le=1)
    """The part of the price that is charged for what came from the cache, or from an identical item in flight."""


class ImageDefaults(_Entry):
    """Defaults and bounds of an image model's parameters; `scheduler` is one of shared.diffusion_schedulers."""

    width: Positive = 512
    height: Positive = 512
    steps: Positive = 20
    longest_steps: Positive = 100
    guidance_scale: float = Field(7.5, ge=0)
    scheduler: str = "ddim"
    largest_pixels: Positive = 1024 * 1024
    """The largest width x height that may be asked for."""
    multiple: Positive = 8
    """Width and height are multiples of this (the VAE's scale)."""
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile of UNet and VAE for the usual size, at warm-up: `auto` on GPUs, `always` on a CPU too."""


class TextLimits(_Entry):
    """What an embeddings request may hold."""

    max_items: Positive = 2048
    max_input_bytes: Positive = 64 * 1024


class Tolerance(_Entry):
    """How far results may lie from those of torch fp32, the reference.

    `cosine`: the least cosine similarity of an embedding to the reference's; over a calibration set the minimum counts,
    not the mean, since a caller gets single vectors. `psnr_db`: the least peak signal-to-noise ratio of an image.
    """

    cosine: float = Field(0.9999, ge=0, le=1)
    psnr_db: float = Field(30.0, ge=0)


class Model(_Entry):
    """One served model; see models.yaml for two in full."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9._-]{2,199}$")
    task: Literal["embedding", "image"]
    source: str = Field(pattern=r"^(hf:|gs://|local:|package:).+")
    revision: str = "main"
    aliases: tuple[str, ...] = ()
    backend: Literal["auto", "torch", "onnx"] = "auto"
    """What computes. `auto`: the fastest within the tolerance, as each worker measures it. Images are torch's."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """`auto`: the fastest that the tolerance allows; for images, what the device does best."""
    tolerance: Tolerance = Tolerance()
    dimensions: Positive | None = None
    batch: Batch = Batch()
    max_in_flight: Positive = 512
    """Items that wait for a worker in one API instance, from which on requests are refused with 429."""
    deadline: Deadline = Deadline()
    cache: Cache = Cache()
    text: TextLimits = TextLimits()
    image: ImageDefaults = ImageDefaults()
    gpu: Gpu = Gpu()
    replicas: Replicas = Replicas()
    price: Price = Price()

    @field_validator("revision", mode="before")
    @classmethod
    def _revision_is_text(cls, value: object) -> object:
        # YAML reads 1.10 as 1.1 and 0123 as 83: only quotes keep what was meant.
        if isinstance(value, int | float):
            raise ValueError("a revision that looks like a number needs quotes")
        return value

    @model_validator(mode="before")
    @classmethod
    def _images_are_torch(cls, value: object) -> object:
        return {"backend": "torch"} | value if isinstance(value, dict) and value.get("task") == "image" else value

    @model_validator(mode="after")
    def _backend_computes_precision(self) -> Self:
        if self.task == "image" and self.backend != "torch":
            raise ValueError("an image model needs backend torch")
        if self.task == "embedding" and self.backend == "torch" and self.precision == "int8":
            raise ValueError("embeddings in precision int8 need backend onnx or auto")
        if self.backend == "onnx" and self.precision == "bf16":
            raise ValueError("precision bf16 needs backend torch or auto")
        return self

    @model_validator(mode="after")
    def _budget_fits_task(self) -> Self:
        if self.task == "embedding" and (self.batch.max_tokens is None or self.dimensions is None):
            raise ValueError("an embedding model needs batch.max_tokens and dimensions")
        if self.task == "image" and self.batch.max_pixel_steps is None:
            raise ValueError("an image model needs batch.max_pixel_steps")
        if self.name.endswith(".dead"):
            raise ValueError("a name can't end in .dead: its topic would be another model's dead-letter topic")
        if self.deadline.default_s > self.deadline.longest_s:
            raise ValueError("deadline.default_s is above deadline.longest_s")
        return self

    @property
    def budget(self) -> int:
        """The most work (tokens or pixel-steps) in one batch."""
        budget = self.batch.max_tokens if self.task == "embedding" else self.batch.max_pixel_steps
        assert budget is not None, "checked when the catalog was read; this is a bug"
        return budget

    def cost_usd(self, tokens: int = 0, pixel_steps: int = 0) -> float:
        """What computing this much is billed at."""
        price = self.price
        return (tokens * price.per_million_tokens_usd + pixel_steps * price.per_million_pixel_steps_usd) / 1e6


class Catalog:
    """All served models, by name and alias."""

    def __init__(self, models: tuple[Model, ...]) -> None:
        self.models = models
        self._by_name = {alias: model for model in models for alias in (model.name, *model.aliases)}

    def find(self, name: str, task: str | None = None) -> Model:
        """The model called `name` (or by that alias), which must serve `task` where one is given.

        Raises:
            UnknownModel: there is none, or it serves another task.
        """
        model = self._by_name.get(name)
        if model is None:
            served = ", ".join(m.name for m in self.models if task in (None, m.task))
            raise UnknownModel(f"model {name!r} is not served here; served: {served}", field="model")
        if task is not None and model.task != task:
            raise UnknownModel(f"model {name!r} serves {model.task}, not {task}", field="model")
        return model

    @property
    def deadline(self) -> Deadline:
        """The most that any model allows, for what is asked before the model is known."""
        every = [model.deadline for model in self.models]
        return Deadline(
            default_s=max((one.default_s for one in every), default=Deadline().default_s),
            longest_s=max((one.longest_s for one in every), default=Deadline().longest_s),
        )

    def default(self, task: str) -> Model:
        """The first model of `task` in the catalog, for callers who name none."""
        for model in self.models:
            if model.task == task:
                return model
        raise UnknownModel(f"no {task} model is served here", field="model")


def read_catalog(path: Path) -> Catalog:
    """Reads and checks a catalog file.

    Raises:
        ConfigurationError: the file can't be read or an entry is wrong; the message has file, line and reason.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    entries = _entries(path, root)
    models = tuple(_read_entry(path, node) for node in entries)
    seen: dict[str, int] = {}
    for model, node in zip(models, entries, strict=True):
        for name in (model.name, *model.aliases):
            if name in seen:
                raise ConfigurationError(f"{path}:{_line(node)}: the name {name!r} is taken by line {seen[name]}")
            seen[name] = _line(node)
    return Catalog(models)


def _entries(path: Path, root: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.value == "models" and isinstance(value, yaml.SequenceNode) and value.value:
                return list(value.value)
    raise ConfigurationError(f"{path}:1: a catalog is a mapping with a list `models` of at least one entry")


def _read_entry(path: Path, node: yaml.Node) -> Model:
    constructor = yaml.SafeLoader("")
    try:
        return Model.model_validate(constructor.construct_document(node))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "entry"
        line = _line(_descend(node, first["loc"]))
        raise ConfigurationError(f"{path}:{line}: {where}: {first['msg']}", field=where) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error}") from error
    finally:
        constructor.dispose()


def _descend(node: yaml.Node, location: tuple[int | str, ...]) -> yaml.Node:
    """The node that `location` names, or the nearest one above it."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == part]
            if not found:
                return node
            node = found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
    return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
