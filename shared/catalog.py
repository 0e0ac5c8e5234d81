"""The catalog (`models.yaml`) of served models. Every process reads and checks it at its start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from shared.catalog_entry import (
    FLOW_SOURCE,
    MAX_DEADLINE_S,
    CatalogEntry,
    Deadline,
    FlowEntry,
    Gpu,
    ModelResources,
    Replicas,
    ServedApi,
    WorkersEntry,
)
from shared.errors import ConfigurationError, UnknownModel
from shared.flow_plan import FlowPlan
from shared.flow_types import FlowError, StepSchema, check_flow
from shared.image_flow import bounded, check_steps, plan_of_images
from shared.kubernetes_names import slug
from shared.model_interface import FILE_NAME, ModelInterface, read_interface
from shared.tasks import TASKS
from shared.tasks.base import Task, Unit
from shared.tasks.custom import CUSTOM

log = logging.getLogger(__name__)

CANARY_SUFFIX = ".canary"
RUNS_AT_A_TIME = 64
"""Of a flow. A tenant with twice as many open gets `batch` priority for further ones."""
OF_CATALOG = "an entry of the catalog"
"""The context in which entries are validated."""


class Model(CatalogEntry):
    """One served model, checked by the rules of its task. Or a flow, which is served like one."""

    step_models: tuple[Model, ...] = ()
    """The models of a flow's steps, in the order of these."""
    drawn_by: Model | None = None
    """Of the flow that a request for images is: the image model, whose name it has."""

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
        if self.source.startswith(FLOW_SOURCE) != (self.flow is not None):
            raise ValueError("source, flow: flows have a list of their own, `flows`")
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
        usual = ModelResources()
        for name, value in self.resources:
            if name != "gpu_memory_bytes" and value != getattr(usual, name):
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
    def limited_unit(self) -> Unit:
        """The unit of the work that limits count."""
        return (self.drawn_by or self).definition.unit

    @property
    def budget(self) -> int:
        """The most work (in the unit of the task) in one batch."""
        return self.definition.budget(self)

    @property
    def result_tolerance(self) -> float:
        """Maximum distance of results from those of torch fp32, in the measure of the task."""
        return self.definition.tolerance(self)


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that are deployed and scaled together: of one model, or of several."""

    name: str
    """That of its only model, or of the entry of `workers`."""
    models: tuple[Model, ...]
    replicas: Replicas

    @property
    def gpu(self) -> Gpu:
        """What each of them gets, the same for all models."""
        return self.models[0].gpu

    @property
    def is_shared(self) -> bool:
        """True if they serve several models."""
        return len(self.models) > 1


class Catalog:
    """All served models, by name and alias.

    `models` are those that callers know. `deployed` has their canaries too: all that have topics
    and workers. `flows` have neither. `shared_workers` are the workers of several models.
    """

    def __init__(
        self,
        models: tuple[Model, ...],
        flows: tuple[Model, ...] = (),
        shared_workers: tuple[WorkersEntry, ...] = (),
    ) -> None:
        self.models = models
        self.flows = flows
        self.shared_workers = shared_workers
        self.canaries = {
            model.name: canary for model in models if (canary := model.as_canary()) is not None
        }
        """The entries by the names of their models."""
        self.deployed = (*models, *self.canaries.values())
        self._deployed_by_name = {canary.name: canary for canary in self.canaries.values()}
        self._by_name = {
            alias: model for model in self.served for alias in (model.name, *model.aliases)
        }
        self._image_flows: dict[tuple[str, bool], Model | None] = {}

    def image_flow(self, model: Model, images: int, *, upscales: bool) -> Model | None:
        """The flow that a request for images is. None: it has no step after the image.

        Args:
            model: the image model.
            images: how many it asks for.
            upscales: whether it asks for larger ones.

        Raises:
            FlowError: an entry that no file had names what is not there.
        """
        key = model.name, upscales
        if key not in self._image_flows:
            self._image_flows[key] = image_flow_of(model, self, upscales=upscales)
        flow = self._image_flows[key]
        if flow is None or flow.flow is None:
            return None
        return flow.model_copy(update={"flow": bounded(flow.flow, images)})

    @property
    def served(self) -> tuple[Model, ...]:
        """All that callers can ask: models and flows."""
        return (*self.models, *self.flows)

    @property
    def worker_groups(self) -> tuple[WorkerGroup, ...]:
        """Every deployed model once, in the order of the models. A canary has its own workers."""
        shared = {name: entry for entry in self.shared_workers for name in entry.models}
        groups: dict[str, WorkerGroup] = {}
        for model in self.deployed:
            entry = shared.get(model.name)
            if entry is None:
                groups[model.name] = WorkerGroup(model.name, (model,), model.replicas)
            elif entry.name not in groups:
                models = tuple(self.find(name) for name in entry.models)
                groups[entry.name] = WorkerGroup(entry.name, models, entry.replicas)
        return tuple(groups.values())

    def find(self, name: str, task: str | None = None) -> Model:
        """The model or flow called `name` (or by that alias), which must serve `task`, if passed.

        Raises:
            UnknownModel: there is none, or it serves another task.
        """
        model = self._by_name.get(name)
        if model is None:
            raise unknown_model(name)
        if task is not None and model.definition is not TASKS[task]:
            raise UnknownModel(f"model {name!r} serves {model.task}, not {task}", field="model")
        return model

    def step_schema(self, name: str) -> StepSchema | None:
        """What a step may give to the model of this name and gets. None: there is none."""
        model = self._by_name.get(name)
        return None if model is None else model.definition.step_schema(model)

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
        if changed:
            self._image_flows.clear()
            self.flows = newer.flows
            self._by_name |= {
                alias: flow for flow in self.flows for alias in (flow.name, *flow.aliases)
            }
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
        every = [model.deadline for model in self.served]
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
        for model in self.served:
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
    root = _composed(path)
    entries = _entries(path, root, "models")
    models = tuple(_read_entry(path, node) for node in entries)
    of_flows, of_workers = _entries(path, root, "flows"), _entries(path, root, "workers")
    workers = _read_workers(path, of_workers, models)
    models = _with_replicas(models, workers)
    catalog = Catalog(models)
    for model, node in zip(models, entries, strict=True):
        with _placed(path, node):
            check_steps(model, catalog.step_schema)
    flows = tuple(_read_flow(path, node, catalog) for node in of_flows)
    nodes = [*entries, *of_flows, *of_workers]
    names = [(one.name, *one.aliases) for one in (*models, *flows)]
    names += [(one.name,) for one in workers]
    _check_names(path, names, nodes)
    deployed = [(one.name, canary.name if (canary := one.as_canary()) else "") for one in models]
    deployed += [(one.name, "") for one in workers]
    _check_slugs(path, deployed, [*entries, *of_workers])
    return Catalog(models, flows, workers)


def _composed(path: Path) -> yaml.Node | None:
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _check_names(path: Path, names: Sequence[tuple[str, ...]], nodes: Sequence[yaml.Node]) -> None:
    """Checks that no two entries have a name or an alias in common.

    Raises:
        ConfigurationError: they have.
    """
    seen: dict[str, int] = {}
    for own, node in zip(names, nodes, strict=True):
        for name in own:
            if name in seen:
                raise ConfigurationError(
                    f"{path}:{_line(node)}: the name {name!r} is taken by line {seen[name]}"
                )
            seen[name] = _line(node)


def _check_slugs(
    path: Path, deployed: Sequence[tuple[str, ...]], nodes: Sequence[yaml.Node]
) -> None:
    """Checks that no two of those that have objects in Kubernetes have the same name there.

    Raises:
        ConfigurationError: they have.
    """
    slugs: dict[str, str] = {}
    for own, node in zip(deployed, nodes, strict=True):
        for name in filter(None, own):
            if (other := slugs.setdefault(slug(name), name)) != name:
                raise ConfigurationError(
                    f"{path}:{_line(node)}: {other!r} and {name!r} are both "
                    f"{slug(name)!r} to Kubernetes; rename one"
                )


def _read_workers(
    path: Path, nodes: list[yaml.Node], models: tuple[Model, ...]
) -> tuple[WorkersEntry, ...]:
    """The entries of `workers`, whose models can share a worker."""
    entries: list[WorkersEntry] = []
    for node in nodes:
        with _placed(path, node) as constructor:
            entry = WorkersEntry.model_validate(constructor.construct_document(node))
        for number in range(len(entry.models)):
            if reason := _unshareable(entry, number, models, entries):
                raise _misplaced(path, node, ("models", number), reason)
        entries.append(entry)
    return tuple(entries)


def _unshareable(
    entry: WorkersEntry, number: int, models: tuple[Model, ...], others: list[WorkersEntry]
) -> str:
    """Why a model of the list can't be one of those that share these workers. Empty: it can."""
    by_name = {model.name: model for model in models}
    name = entry.models[number]
    if name not in by_name:
        return f"no model {name!r}; the catalog's models are: {', '.join(by_name)}"
    if name in entry.models[:number]:
        return f"{name!r} is in this list twice"
    for other in others:
        if name in other.models:
            return f"{name!r} is a model of the workers {other.name!r} already"
    model, first = by_name[name], by_name[entry.models[0]]
    if model.gpu != first.gpu:
        return (
            f"{name!r} has the gpu {_gpu_words(model.gpu)}, and {first.name!r} has "
            f"{_gpu_words(first.gpu)}; models that share workers have the same"
        )
    if "replicas" in model.model_fields_set:
        return f"{name!r} has replicas of its own; leave them out, as the workers have replicas"
    return ""


def _with_replicas(
    models: tuple[Model, ...], workers: tuple[WorkersEntry, ...]
) -> tuple[Model, ...]:
    """The models with the replicas of the workers that they share."""
    replicas = {name: entry.replicas for entry in workers for name in entry.models}
    return tuple(
        model.model_copy(update={"replicas": replicas[model.name]})
        if model.name in replicas
        else model
        for model in models
    )


def _gpu_words(gpu: Gpu) -> str:
    said = ", ".join(f"{key}: {value}" for key, value in gpu.model_dump().items())
    return f"{{{said}}}"


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


def _entries(path: Path, root: yaml.Node | None, kind: str) -> list[yaml.Node]:
    """The entries of `models`, of which there is at least one, of `flows` or of `workers`."""
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == kind and isinstance(value, yaml.SequenceNode) and value.value:
            return list(value.value)
        if key.value == kind != "models":
            raise ConfigurationError(f"{path}:{_line(key)}: {kind}: a list is needed")
    if kind != "models":
        return []
    raise ConfigurationError(
        f"{path}:1: a catalog is a mapping with a list `models` of at least one entry"
    )


def _read_entry(path: Path, node: yaml.Node) -> Model:
    with _placed(path, node) as constructor:
        entry = constructor.construct_document(node)
        if isinstance(entry, dict):
            entry = _with_interface(path, entry)
        return Model.model_validate(entry, context=OF_CATALOG)


def _read_flow(path: Path, node: yaml.Node, catalog: Catalog) -> Model:
    with _placed(path, node) as constructor:
        return flow_of(FlowEntry.model_validate(constructor.construct_document(node)), catalog)


def flow_of(entry: FlowEntry, catalog: Catalog) -> Model:
    """Returns a flow as it is served: like a model of one's own, with the models of its steps.

    Args:
        entry: what the file says.
        catalog: has the models.

    Raises:
        FlowError: the steps do not fit their models.
        ValidationError: the name can't be served.
    """
    plan = FlowPlan.model_validate(
        entry.model_dump(include=set(FlowPlan.model_fields), exclude_unset=True)
    )
    return _served_flow(plan, check_flow(plan, catalog.step_schema), entry, catalog)


def image_flow_of(model: Model, catalog: Catalog, *, upscales: bool) -> Model | None:
    """Returns the flow that requests for images of a model are. None: they have one step.

    It has as much time as its steps together.

    Args:
        model: the image model.
        catalog: has the models of the steps.
        upscales: whether the requests ask for larger images.

    Raises:
        FlowError: a step does not fit its model.
    """
    plan = plan_of_images(model, upscales=upscales)
    if plan is None:
        return None
    check_steps(model, catalog.step_schema)
    deadlines = [catalog.find(step.model).deadline for step in plan.steps]
    entry = FlowEntry(
        name=model.name,
        steps=plan.steps,
        output=None,
        deadline=Deadline(
            default_s=min(MAX_DEADLINE_S, sum(one.default_s for one in deadlines)),
            longest_s=min(MAX_DEADLINE_S, sum(one.longest_s for one in deadlines)),
        ),
        max_in_flight=model.max_in_flight,
    )
    flow = _served_flow(plan, {}, entry, catalog)
    return flow.model_copy(update={"drawn_by": model})


def _served_flow(
    plan: FlowPlan, output: Mapping[str, Any], entry: FlowEntry, catalog: Catalog
) -> Model:
    models = tuple(catalog.find(step.model) for step in plan.steps)
    revisions = [(model.name, model.revision) for model in models]
    digest = hashlib.sha256(json.dumps([plan.as_json(), revisions]).encode()).hexdigest()
    return Model.model_validate(
        {
            "name": entry.name,
            "task": CUSTOM.name,
            "source": FLOW_SOURCE + entry.name,
            "revision": digest[:16],
            "aliases": entry.aliases,
            "deadline": entry.deadline,
            "max_in_flight": entry.max_in_flight,
            "api": entry.api,
            "batch": {"max_items": RUNS_AT_A_TIME},
            "interface": ModelInterface(
                inputs=plan.input_schema,
                output=dict(output),
                concurrency=RUNS_AT_A_TIME,
                cog_version="",
                sources_sha256=digest,
            ),
            "flow": plan,
            "step_models": models,
        },
        context=OF_CATALOG,
    )


@contextmanager
def _placed(path: Path, node: yaml.Node) -> Iterator[yaml.SafeLoader]:
    """Reads an entry. Errors name the file, the line and the place in the entry."""
    constructor = yaml.SafeLoader("")
    try:
        yield constructor
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error.message}", field=error.field) from (
            error
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise _misplaced(path, node, first["loc"], first["msg"]) from error
    except FlowError as error:
        raise _misplaced(path, node, error.place, str(error)) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}:{_line(node)}: {error}") from error
    finally:
        constructor.dispose()


def _misplaced(
    path: Path, node: yaml.Node, place: tuple[int | str, ...], reason: str
) -> ConfigurationError:
    where = ".".join(str(part) for part in place) or "entry"
    line = _line(_descend(node, place))
    return ConfigurationError(f"{path}:{line}: {where}: {reason}", field=where)


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
