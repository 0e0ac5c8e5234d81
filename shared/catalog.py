"""The catalog (`models.yaml`) of served models. Every process reads and checks it at its start."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from shared.catalog_entry import CatalogEntry, ClassResources, Deadline, ServedApi
from shared.errors import ConfigurationError, UnknownModel
from shared.kubernetes_names import slug
from shared.model_interface import FILE_NAME, read_interface
from shared.tasks import TASKS
from shared.tasks.base import Task

log = logging.getLogger(__name__)

CANARY_SUFFIX = ".canary"
OF_CATALOG = "an entry of the catalog"
"""The context in which entries are validated."""


class Model(CatalogEntry):
    """One served model, checked by the rules of its task."""

    @field_validator("task")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in TASKS:
            raise ValueError(f"unknown task {value!r}; use one of {', '.join(TASKS)}")
        return value

    @field_validator("name")
    @classmethod
    def _is_no_canary(cls, value: str, info: ValidationInfo) -> str:
        # Canaries are read too, by model processes, but no catalog has their names.
        if info.context == OF_CATALOG and value.endswith(CANARY_SUFFIX):
            raise ValueError(
                f"a name can't end in {CANARY_SUFFIX}: its topic would be that of another model's "
                "canary"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _takes_defaults_of_task(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        name = value.get("task")
        task = TASKS.get(name) if isinstance(name, str) else None
        return value if task is None else {**task.entry_defaults(value), **value}

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.precision not in self.definition.precisions:
            known = ", ".join(self.definition.precisions)
            raise ValueError(
                f"precision: {self.definition.noun} has no {self.precision}; it has {known}"
            )
        self.definition.check_entry(self)
        self._check_rerank()
        if not self.definition.has_interface:
            self._has_no_fields_of_ones_own()
        if self.replies == "slots" and not self.definition.stores_blobs:
            raise ValueError(
                f"replies: slots carry small results only, and those of {self.definition.noun} "
                "can't be put into the object store; use direct"
            )
        if not self.definition.has_interface:
            self._has_no_resources()
        if self.name.endswith(".dead"):
            raise ValueError(
                "a name can't end in .dead: its topic would be another model's dead-letter topic"
            )
        if (
            self.canary
            and not self.is_canary
            and (self.canary.revision, self.canary.source or self.source)
            == (
                self.revision,
                self.source,
            )
        ):
            raise ValueError("canary.revision is the revision of the model itself")
        if self.deadline.default_s > self.deadline.longest_s:
            raise ValueError("deadline.default_s is above deadline.longest_s")
        return self

    def _check_rerank(self) -> None:
        if self.rerank != "cosine" and not self.definition.compares_texts:
            raise ValueError(f"rerank: {self.definition.noun} has none; leave it out")

    def _has_no_resources(self) -> None:
        usual = ClassResources()
        for name, value in self.resources:
            if value != getattr(usual, name):
                raise ValueError(f"resources.{name}: only models of one's own have it")

    def _has_no_fields_of_ones_own(self) -> None:
        fields = {
            "batch.key": self.batch.key,
            "batch.max_work": self.batch.max_work,
            "work.max": self.work.max,
            "deterministic": self.deterministic or None,
            "api": self.api,
            "price.per_work_usd": self.price.per_work_usd or None,
        }
        for name, value in fields.items():
            if value is not None:
                raise ValueError(f"{name}: {self.definition.noun} has none; leave it out")

    @property
    def is_canary(self) -> bool:
        """True if it is the canary of a model, and not a catalog model of its own."""
        return self.name.endswith(CANARY_SUFFIX)

    @property
    def public_name(self) -> str:
        """The name that callers know. A canary has that of its model."""
        return self.name.removesuffix(CANARY_SUFFIX)

    def as_canary(self) -> Model | None:
        """The model that its canary is to the pipeline: `<name>.canary`. None without a canary."""
        canary = self.canary
        if canary is None:
            return None
        update = {
            "name": self.name + CANARY_SUFFIX,
            "aliases": (),
            "revision": canary.revision,
            "source": canary.source or self.source,
            "replicas": canary.replicas,
        }
        return self.model_copy(update=update)

    @cached_property
    def definition(self) -> Task:
        """The definition of its task."""
        return TASKS[self.task]

    @property
    def budget(self) -> int:
        """The most work (in the unit of the task) in one batch."""
        return self.definition.budget(self)

    @property
    def result_tolerance(self) -> float:
        """Maximum distance of results from those of torch fp32, in the measure of the task."""
        return self.definition.tolerance(self)


class Catalog:
    """All served models, by name and alias.

    `models` are those that callers know. `deployed` has their canaries too: all that have topics
    and workers.
    """

    def __init__(self, models: tuple[Model, ...]) -> None:
        self.models = models
        self.canaries = {
            model.name: canary for model in models if (canary := model.as_canary()) is not None
        }
        """The entries by the names of their models."""
        self.deployed = (*models, *self.canaries.values())
        self._deployed_by_name = {canary.name: canary for canary in self.canaries.values()}
        self._by_name = {alias: model for model in models for alias in (model.name, *model.aliases)}

    def find(self, name: str, task: str | None = None) -> Model:
        """The model called `name` (or by that alias), which must serve `task` if one is passed.

        Raises:
            UnknownModel: there is none, or it serves another task.
        """
        model = self._by_name.get(name)
        if model is None:
            raise unknown_model(name)
        if task is not None and model.definition is not TASKS[task]:
            raise UnknownModel(f"model {name!r} serves {model.task}, not {task}", field="model")
        return model

    def find_deployed(self, name: str) -> Model:
        """The model that jobs and workers call `name`: one of the catalog, or a canary.

        Raises:
            UnknownModel: there is none.
        """
        return self._deployed_by_name.get(name) or self.find(name)

    def take_interfaces(self, newer: Catalog) -> list[str]:
        """Takes the interfaces of models of one's own from a catalog that was read later.

        Only of models that are the same otherwise: an entry needs a new start of all processes.

        Returns:
            The names of the models whose interface is another one now.
        """
        changed = []
        for old in self.deployed:
            new = newer._deployed_by_name.get(old.name) or newer._by_name.get(old.name)
            if new is None or new.interface == old.interface:
                continue
            if old.model_copy(update={"interface": new.interface}) == new:
                changed.append(old.name)
                self._replace(new)
        return changed

    def _replace(self, model: Model) -> None:
        self.models = tuple(model if one.name == model.name else one for one in self.models)
        if model.is_canary:
            # In place: others hold it.
            self.canaries[model.public_name] = self._deployed_by_name[model.name] = model
        else:
            self._by_name |= dict.fromkeys((model.name, *model.aliases), model)
        self.deployed = (*self.models, *self.canaries.values())

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
            if model.definition is TASKS[task]:
                return model
        raise UnknownModel(f"no {task} model is served here", field="model")

    def serving(self, api: ServedApi, name: str | None) -> Model:
        """The model of one's own called `name` that serves an endpoint. None: the first of them.

        Raises:
            UnknownModel: there is none, or it does not serve this endpoint.
        """
        if name is not None:
            model = self.find(name)
            if model.api != api:
                raise UnknownModel(f"model {name!r} does not serve {api}", field="model")
            return model
        for model in self.models:
            if model.api == api:
                return model
        raise UnknownModel(f"no model for {api} is served here", field="model")


def unknown_model(name: str) -> UnknownModel:
    """The error for a model that is not there, or that this caller may not see.

    It names no other model, because the caller may see only some.
    """
    return UnknownModel(
        f"model {name[:80]!r} is not served here (GET /v1/models lists those that are)",
        field="model",
    )


def read_catalog(path: Path) -> Catalog:
    """Reads and checks a catalog file.

    Raises:
        ConfigurationError: the file can't be read or an entry is wrong. The message has file, line
            and reason.
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
                raise ConfigurationError(
                    f"{path}:{_line(node)}: the name {name!r} is taken by line {seen[name]}"
                )
            seen[name] = _line(node)
    slugs: dict[str, str] = {}
    for model, node in zip(models, entries, strict=True):
        for name in (model.name, *([canary.name] if (canary := model.as_canary()) else [])):
            if (other := slugs.setdefault(slug(name), name)) != name:
                raise ConfigurationError(
                    f"{path}:{_line(node)}: models {other!r} and {name!r} are both "
                    f"{slug(name)!r} to Kubernetes; rename one"
                )
    return Catalog(models)


def reread_interfaces(catalog: Catalog, path: Path) -> None:
    """Takes the interfaces that the catalog file has now, and says so in the log.

    `penstock up` has API and runner of batches do it, when a class has changed.
    """
    try:
        changed = catalog.take_interfaces(read_catalog(path))
    except ConfigurationError as error:
        log.error("the catalog can't be read again", extra={"reason": error.message})
    else:
        log.info("catalog read again", extra={"models": changed})


def _entries(path: Path, root: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.value == "models" and isinstance(value, yaml.SequenceNode) and value.value:
                return list(value.value)
    raise ConfigurationError(
        f"{path}:1: a catalog is a mapping with a list `models` of at least one entry"
    )


def _read_entry(path: Path, node: yaml.Node) -> Model:
    constructor = yaml.SafeLoader("")
    try:
        entry = constructor.construct_document(node)
        if isinstance(entry, dict):
            entry = _with_interface(path, entry)
        return Model.model_validate(entry, context=OF_CATALOG)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error.message}", field=error.field) from (
            error
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "entry"
        line = _line(_descend(node, first["loc"]))
        raise ConfigurationError(f"{path}:{line}: {where}: {first['msg']}", field=where) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error}") from error
    finally:
        constructor.dispose()


LOCAL = "local:"


def _with_interface(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with its interface in place of the path of the file that has it.

    Raises:
        ConfigurationError: the file is missing or wrong.
    """
    name, source = entry.get("task"), entry.get("source")
    task = TASKS.get(name) if isinstance(name, str) else None
    if task is None or not task.has_interface or not isinstance(source, str):
        return entry
    if "interface" in entry:
        file = path.parent / str(entry["interface"])
    elif source.startswith(LOCAL):
        file = Path(source.removeprefix(LOCAL)).expanduser() / FILE_NAME
    else:
        raise ConfigurationError(
            f"interface: {source} is not on this machine; give the path of a copy of its "
            f"{FILE_NAME}, from the catalog's folder",
            field="interface",
        )
    return {**entry, "interface": read_interface(file)}


def _descend(node: yaml.Node, location: tuple[int | str, ...]) -> yaml.Node:
    """The node that `location` names, or the nearest one above it."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = [pair for pair in node.value if pair[0].value == part]
            if not pairs:
                return node
            node = pairs[0][1]
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            node = node.value[part]
    return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
