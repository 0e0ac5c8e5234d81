"""The catalog (`models.yaml`) of served models.

Every process reads and validates the catalog at startup.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.errors import UnknownModel
from shared.models.entry import (
    MAX_DEADLINE_S,
    Batch,
    Canary,
    CatalogEntry,
    Deadline,
    FlowEntry,
    Gpu,
    ModelResources,
    Replicas,
    ServedApi,
    TextAdapter,
    WorkersEntry,
)
from shared.models.entry_fields import FLOW_SOURCE
from shared.models.flow_plan import FlowPlan, FlowStep
from shared.models.flow_types import StepSchema, check_flow
from shared.models.image_flow import check_steps, plan_of_images
from shared.models.interface import ModelInterface
from shared.models.tasks import TASKS, Input
from shared.models.tasks.base import Task, Unit, WorkBound
from shared.models.tasks.custom import CUSTOM, check_flow_api, interface_of
from shared.models.tasks.image import ImagesInput

log = logging.getLogger(__name__)

CANARY_SUFFIX = ".canary"
RUNS_AT_A_TIME = 64
"""Maximum number of open runs per flow. A tenant with twice that many open runs gets `batch`
priority for any additional ones.
"""
OF_CATALOG = "an entry of the catalog"
"""Context passed to validators for catalog entries."""


def model_of_canary(name: str) -> str | None:
    """Returns the model whose canary has this name in jobs and topics.

    None if this isn't a canary's name.
    """
    model = name.removesuffix(CANARY_SUFFIX)
    return None if model == name else model


class Model(CatalogEntry):
    """One served model, validated against its task's rules."""

    @field_validator("task")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in TASKS:
            raise ValueError(f"unknown task {value!r}; use one of {', '.join(TASKS)}")
        return value

    @field_validator("name")
    @classmethod
    def _is_no_canary(cls, value: str, info: ValidationInfo) -> str:
        # Model processes also read canaries, but a catalog can't contain their names.
        if info.context == OF_CATALOG and model_of_canary(value):
            raise ValueError(
                f"a name must not end in {CANARY_SUFFIX} because its topic would belong to "
                "another model's canary"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _takes_defaults_of_task(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        name = value.get("task")
        is_vllm = name == "text" and value.get("backend") == "vllm"  # its name in 0.1.0
        if is_vllm and value.get("engine", "auto") in ("auto", "vllm"):
            value = {**value, "backend": "auto", "engine": "vllm"}
        task = TASKS.get(name) if isinstance(name, str) else None
        if task is None:
            return value
        defaults = task.entry_defaults(value)
        fields = {**defaults, **value}
        if isinstance(batch := value.get("batch"), Mapping):
            fields["batch"] = {**defaults.get("batch", {}), **batch}
        return fields

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.engine not in self.definition.engines:
            raise ValueError(f"{self.definition.noun} does not support engine; omit it")
        if self.precision not in self.definition.precisions:
            known = ", ".join(self.definition.precisions)
            raise ValueError(
                f"precision: {self.definition.noun} does not support {self.precision}; use "
                f"one of {known}"
            )
        self._check_by_task()
        self._check_gpu_count()
        self._check_rerank()
        if not self.definition.has_interface:
            self._refuse_custom_fields()
            self._refuse_resources()
        if self.replies == "slots" and not self.definition.stores_blobs:
            raise ValueError(
                f"replies: must be direct because results from {self.definition.noun} can't be "
                "stored in the object store"
            )
        for adapter in self.generation.adapters:
            if adapter.endswith((CANARY_SUFFIX, ".dead")):
                raise ValueError(
                    f"generation.adapters.{adapter}: a name must not end in {CANARY_SUFFIX} or "
                    ".dead"
                )
        if self.name.endswith(".dead"):
            raise ValueError(
                "a name must not end in .dead because its topic would be another model's "
                "dead-letter topic"
            )
        if (
            self.canary
            and model_of_canary(self.name) is None
            and (self.canary.revision, self.canary.source or self.source)
            == (
                self.revision,
                self.source,
            )
        ):
            raise ValueError("canary.revision must differ from the model's revision")
        if self.deadline.default_s > self.deadline.longest_s:
            raise ValueError("deadline.default_s must not exceed deadline.longest_s")
        return self

    def _check_by_task(self) -> None:
        self.definition.check_entry(self)

    def _check_gpu_count(self) -> None:
        if self.gpu.count > 1 and self.engine != "vllm":
            raise ValueError(
                f"gpu.count: must be 1, got {self.gpu.count}; only engine vllm uses several GPUs "
                "per worker"
            )

    def _check_rerank(self) -> None:
        if self.rerank != "cosine" and not self.definition.compares_texts:
            raise ValueError(f"rerank: not supported by {self.definition.noun}; omit it")

    def _refuse_resources(self) -> None:
        usual = ModelResources()
        for name, value in self.resources:
            if name != "gpu_memory_bytes" and value != getattr(usual, name):
                raise ValueError(
                    f"resources.{name}: only supported by custom models; omit it otherwise"
                )

    def _refuse_custom_fields(self) -> None:
        fields = {
            "batch.key": self.batch.key,
            "batch.max_work": self.batch.max_work,
            "work.max": self.work.max,
            "deterministic": self.deterministic or None,
            "api": self.api,
            "price.per_work_usd": self.price.per_work_usd or None,
            "environment": self.environment or None,
            "secrets": self.secrets or None,
            "processes": self.processes,
        }
        for name, value in fields.items():
            if value is not None:
                raise ValueError(f"{name}: not supported by {self.definition.noun}; omit it")

    @property
    def public_name(self) -> str:
        """The name callers know. A canary uses its model's name."""
        return model_of_canary(self.name) or self.name

    @property
    def deployed_name(self) -> str:
        """The name of the model whose topic and workers serve this one."""
        return self.name

    @property
    def entry_name(self) -> str:
        """The name of the entry in the catalog that describes this model."""
        return model_of_canary(self.deployed_name) or self.deployed_name

    @cached_property
    def adapted(self) -> Mapping[str, AdaptedModel]:
        """The model with each of its text adapters, by the adapter's name."""
        plain = self.generation.model_copy(update={"adapters": {}})
        return {
            name: AdaptedModel.model_construct(
                self.model_fields_set,
                **{
                    **dict(self),
                    "name": name,
                    "aliases": (),
                    "canary": None,
                    "generation": plain,
                    "base": self.name,
                    "adapter": adapter,
                },
            )
            for name, adapter in self.generation.adapters.items()
        }

    def find_adapted(self, name: str) -> Model:
        """Returns the model that a job for this model's workers requests.

        Args:
            name: this model's name, or one of its adapters'.

        Raises:
            UnknownModel: it is neither.
        """
        if name == self.name:
            return self
        if name not in self.adapted:
            raise unknown_model(name)
        return self.adapted[name]

    def as_canary(self) -> Revision | None:
        """Returns the revision that receives a share of the requests.

        None if there is no canary.
        """
        canary = self.canary
        if canary is None:
            return None
        update = {
            "name": self.name + CANARY_SUFFIX,
            "aliases": (),
            "revision": canary.revision,
            "source": canary.source or self.source,
            "replicas": canary.replicas,
            # Adapters belong to the model's own revision.
            "generation": self.generation.model_copy(update={"adapters": {}}),
        }
        return Revision.model_construct(self.model_fields_set, **{**dict(self), **update})

    @cached_property
    def definition(self) -> Task:
        return TASKS[self.task]

    @property
    def requested(self) -> Model:
        """The model that callers request: this one, unless it represents an image request's run."""
        return self

    @property
    def steps(self) -> Sequence[tuple[FlowStep, Model]]:
        """A flow's steps, each with its model. Empty for a model."""
        return ()

    def find_bounds(self, inputs: Sequence[Input]) -> Iterable[tuple[Model, Sequence[WorkBound]]]:
        """Returns the steps' models, each with the maximum work for its items."""
        return ()

    @property
    def limited_unit(self) -> Unit:
        """The unit of work that limits are based on."""
        return self.requested.definition.unit

    @property
    def budget(self) -> int:
        """Maximum work per batch, in the task's unit."""
        return self.definition.budget(self)

    @property
    def usual_batch(self) -> Batch:
        """Batch limits for a device without measurements."""
        return self.definition.usual_batch(self)

    @property
    def result_tolerance(self) -> float:
        """Maximum distance between the results and torch fp32 results, as measured for the task."""
        return self.definition.tolerance(self)


class Revision(Model):
    """A model's canary, deployed as `<name>.canary`."""

    canary: Canary
    """The canary's share, and the limits it must stay within to keep that share."""


class AdaptedModel(Model):
    """A text model with one of its adapters.

    Callers request it like any other model. It shares its model's topic, workers, and terms.
    """

    base: str
    """The model's name."""
    adapter: TextAdapter

    @property
    def deployed_name(self) -> str:
        return self.base


class Flow(Model):
    """A flow.

    Callers request it like a custom model, but its steps run on other models' workers.
    """

    source: Annotated[str, Field(pattern=f"^{FLOW_SOURCE}")]
    plan: FlowPlan
    step_models: tuple[Model, ...]
    """The steps' models, in step order."""

    def _check_by_task(self) -> None:
        if self.api is not None:
            check_flow_api(self.api, interface_of(self))

    @property
    def steps(self) -> Sequence[tuple[FlowStep, Model]]:
        return tuple(zip(self.plan.steps, self.step_models, strict=True))

    def find_bounds(self, inputs: Sequence[Input]) -> Iterable[tuple[Model, Sequence[WorkBound]]]:
        for step, model in self.steps:
            count = 1 if step.for_each is None else step.max_items
            yield model, [model.definition.step_bound(model)] * count


class ImageRun(Flow):
    """An image request's flow.

    The flow is named after the model that draws the images in its first step.
    """

    @property
    def requested(self) -> Model:
        return self.step_models[0]

    def find_bounds(self, inputs: Sequence[Input]) -> Iterable[tuple[Model, Sequence[WorkBound]]]:
        (run,) = inputs
        assert isinstance(run, ImagesInput), "only the images of a request are drawn; this is a bug"
        drawing, *others = self.step_models
        yield drawing, [image.bound_work(drawing) for image in run.images]
        for model in others:
            yield model, [model.definition.step_bound(model)] * len(run.seeds)


@dataclass(frozen=True)
class WorkerGroup:
    """Workers deployed and scaled together, which serve one or more models."""

    name: str
    """Name of the group's only model, or of its entry in `workers`."""
    models: tuple[Model, ...]
    replicas: Replicas

    @property
    def gpu(self) -> Gpu:
        """Each worker's GPU resources, the same for all models."""
        return self.models[0].gpu

    @property
    def startup_s(self) -> float:
        """Time limit for a model process, which loads all of these models, to become ready."""
        return sum(model.startup_s for model in self.models)

    @property
    def is_shared(self) -> bool:
        return len(self.models) > 1


class Catalog:
    """All served models, by name and alias.

    `models` are visible to callers. `deployed` also includes canaries, so it lists all models that
    have topics and workers. `flows` have neither. `shared_workers` are workers that serve several
    models.
    """

    def __init__(
        self,
        models: tuple[Model, ...],
        flows: tuple[Flow, ...] = (),
        shared_workers: tuple[WorkersEntry, ...] = (),
    ) -> None:
        self.models = models
        self.flows = flows
        self.shared_workers = shared_workers
        self.canaries = {
            model.name: canary for model in models if (canary := model.as_canary()) is not None
        }
        """Entries by model name."""
        self.deployed = (*models, *self.canaries.values())
        self._by_name = {
            alias: model for model in self.served for alias in (model.name, *model.aliases)
        }
        self._image_runs: dict[tuple[str, bool], ImageRun | None] = {}

    def image_run(self, model: Model, *, upscales: bool) -> ImageRun | None:
        """Returns the flow for an image request, or None if no steps follow the image.

        Args:
            upscales: True if larger images are requested.

        Raises:
            FlowError: an entry that was not read from a file names a missing model.
        """
        key = model.name, upscales
        if key not in self._image_runs:
            self._image_runs[key] = image_run_of(model, self, upscales=upscales)
        return self._image_runs[key]

    @property
    def served(self) -> tuple[Model, ...]:
        """Everything callers can request: models, models with an adapter, and flows."""
        adapted = [model for base in self.models for model in base.adapted.values()]
        return (*self.models, *adapted, *self.flows)

    @property
    def worker_groups(self) -> tuple[WorkerGroup, ...]:
        """All deployed models, each in one group, in model order.

        Canaries have separate workers.
        """
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
        """Returns the model or flow with this name or alias, which must serve `task` if set.

        Raises:
            UnknownModel: it does not exist, or serves a different task.
        """
        model = self._by_name.get(name)
        if model is None:
            raise unknown_model(name)
        if task is not None and model.definition is not TASKS[task]:
            raise UnknownModel(f"model {name!r} is for {model.task}, not {task}", field="model")
        return model

    def step_schema(self, name: str) -> StepSchema | None:
        """Returns the inputs and output that a model has as a flow step.

        None if there is no such model.
        """
        model = self._by_name.get(name)
        return None if model is None else model.definition.step_schema(model)

    def find_deployed_name(self, name: str) -> str:
        """Returns the name of the model whose workers serve `name`, which jobs use."""
        model = self._by_name.get(name)
        return name if model is None else model.deployed_name

    def find_deployed(self, name: str) -> Model:
        """Returns the model that jobs and workers call `name`: either a catalog model or a canary.

        Raises:
            UnknownModel: the model does not exist.
        """
        return self.canaries.get(model_of_canary(name) or "") or self.find(name)

    def take_interfaces(self, newer: Catalog) -> list[str]:
        """Copies custom models' interfaces from a newer catalog.

        This is only for models that are otherwise unchanged, because other changes to an entry
        require restarting all processes.

        Returns:
            The names of models whose interface changed.
        """
        changed, newest = [], {model.name: model for model in newer.deployed}
        for old in self.deployed:
            new = newest.get(old.name)
            if new is None or new.interface == old.interface:
                continue
            if _with_interface(old, new.interface) == new:
                changed.append(old.name)
                self._replace(new)
        if changed:
            self._image_runs.clear()
            self.flows = newer.flows
            self._by_name |= {
                alias: flow for flow in self.flows for alias in (flow.name, *flow.aliases)
            }
        return changed

    def _replace(self, model: Model) -> None:
        self.models = tuple(
            model if existing.name == model.name else existing for existing in self.models
        )
        if isinstance(model, Revision):
            # Done in place, because other objects hold references to it.
            self.canaries[model.public_name] = model
        else:
            self._by_name |= dict.fromkeys((model.name, *model.aliases), model)
        self.deployed = (*self.models, *self.canaries.values())

    @property
    def deadline(self) -> Deadline:
        """The maximum across all models, for use before the model is known."""
        every = [model.deadline for model in self.served]
        return Deadline(
            default_s=max((deadline.default_s for deadline in every), default=Deadline().default_s),
            longest_s=max((deadline.longest_s for deadline in every), default=Deadline().longest_s),
        )

    def of_task(self, task: str) -> list[Model]:
        return [model for model in self.models if model.definition is TASKS[task]]

    def default(self, task: str) -> Model:
        """Returns the first model for `task` in the catalog, for callers who don't name a model."""
        for model in self.of_task(task):
            return model
        raise UnknownModel(f"this API has no {task} models", field="model")

    def serving(self, api: ServedApi, name: str | None) -> Model:
        """Returns the custom model `name` (the first one if None) that serves an endpoint.

        Raises:
            UnknownModel: the model does not exist, or does not serve this endpoint.
        """
        if name is not None:
            model = self.find(name)
            if model.api != api:
                raise UnknownModel(f"model {name!r} does not serve {api}", field="model")
            return model
        for model in self.served:
            if model.api == api:
                return model
        raise UnknownModel(f"this API has no models that support {api}", field="model")


def _with_interface(model: Model, interface: ModelInterface | None) -> Model:
    """Returns the entry with a different interface, which may also change its batch limits."""
    batch = model.batch
    if batch.max_items == _usual_items(model, model.interface):
        batch = batch.model_copy(update={"max_items": _usual_items(model, interface)})
    return model.model_copy(update={"interface": interface, "batch": batch})


def _usual_items(model: Model, interface: ModelInterface | None) -> int:
    """Returns the default number of items in a batch, used if the entry does not set it."""
    defaults = model.definition.entry_defaults({"interface": interface}).get("batch", {})
    return Batch(**defaults).max_items


def unknown_model(name: str) -> UnknownModel:
    """Returns the error for a model that does not exist, or that this caller may not see.

    The error does not name other models, because the caller may not be allowed to see all of them.
    """
    return UnknownModel(
        f"model {name[:80]!r} does not exist; GET /v1/models lists the available models",
        field="model",
    )


def flow_of(entry: FlowEntry, catalog: Catalog) -> Flow:
    """Returns a flow as it is served: like a custom model, with its steps' models.

    Raises:
        FlowError: the steps do not match their models.
        ValidationError: the name can't be served.
    """
    plan = FlowPlan.model_validate(
        entry.model_dump(include=set(FlowPlan.model_fields), exclude_unset=True)
    )
    fields = _fields_of_flow(plan, entry.name, check_flow(plan, catalog.step_schema), catalog)
    own = ("aliases", "deadline", "max_in_flight", "api")
    fields |= {name: getattr(entry, name) for name in own}
    return Flow.model_validate(fields, context=OF_CATALOG)


def image_run_of(model: Model, catalog: Catalog, *, upscales: bool) -> ImageRun | None:
    """Returns the flow for a model's image requests, or None if they have only one step.

    Its time limit is the sum of its steps' time limits, or MAX_DEADLINE_S if that is less.

    Args:
        upscales: True if larger images are requested.

    Raises:
        FlowError: a step does not match its model.
    """
    plan = plan_of_images(model, upscales=upscales)
    if plan is None:
        return None
    check_steps(model, catalog.step_schema)
    fields = _fields_of_flow(plan, model.name, {}, catalog)
    fields |= {"deadline": _deadline_of(plan, catalog), "max_in_flight": model.max_in_flight}
    return ImageRun.model_validate(fields, context=OF_CATALOG)


def _deadline_of(plan: FlowPlan, catalog: Catalog) -> Deadline:
    deadlines = [catalog.find(step.model).deadline for step in plan.steps]
    return Deadline(
        default_s=min(MAX_DEADLINE_S, sum(deadline.default_s for deadline in deadlines)),
        longest_s=min(MAX_DEADLINE_S, sum(deadline.longest_s for deadline in deadlines)),
    )


def _fields_of_flow(
    plan: FlowPlan, name: str, output: Mapping[str, Any], catalog: Catalog
) -> dict[str, Any]:
    models = tuple(catalog.find(step.model) for step in plan.steps)
    revisions = [(model.name, model.revision) for model in models]
    digest = hashlib.sha256(json.dumps([plan.as_json(), revisions]).encode()).hexdigest()
    return {
        "name": name,
        "task": CUSTOM.name,
        "source": FLOW_SOURCE + name,
        "revision": digest[:16],
        "batch": {"max_items": RUNS_AT_A_TIME},
        "interface": ModelInterface(
            inputs=plan.input_schema,
            output=dict(output),
            concurrency=RUNS_AT_A_TIME,
            cog_version="",
            sources_sha256=digest,
        ),
        "plan": plan,
        "step_models": models,
    }
