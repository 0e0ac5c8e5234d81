"""The deployed rules for autoscaling, rollouts, and draining, read from the overlay.

The overlay is written by the same code as `python -m infra.kubernetes`, and rendered as Kustomize
would, to the extent that its files require: resources, components, strategic merges.
tests/infra/simulation compares both if kubectl is installed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import infra
from infra.kubernetes.deployment import Deployment
from infra.kubernetes.overlay import write_overlay
from penstock_planning.item_load import check_work
from penstock_planning.profiles import Profiles, with_served_batches
from penstock_planning.simulation.scenario import Scenario
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Revision, WorkerGroup
from shared.models.catalog_file import read_catalog
from shared.models.kubernetes_names import slug

ALERTS_FILE = Path(infra.__file__).parent / "monitoring/rendered/alerts.json.tftpl"
Document = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, if PyYAML was built with it, takes a tenth as long."""

DEFAULT_UP = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
DEFAULT_DOWN = {
    "stabilizationWindowSeconds": 300,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}
"""Defaults of unset fields: kubernetes.io, Horizontal Pod Autoscaling, "Default Behavior"."""


class _Read(BaseModel):
    """Unlisted fields do not affect the simulation."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ScalingPolicy(_Read):
    """A limit on how far scaling may go within a period."""

    type: Literal["Percent", "Pods"]
    value: int
    periodSeconds: float


class ScalingRules(_Read):
    """One direction in the HPA's `behavior`."""

    stabilizationWindowSeconds: float
    policies: tuple[ScalingPolicy, ...]
    selectPolicy: Literal["Max", "Min", "Disabled"] = "Max"
    tolerance: float = 0.1
    """KEP-4951. Default: --horizontal-pod-autoscaler-tolerance of kube-controller-manager."""


class Behavior(_Read):
    """The HPA's `behavior`, with Kubernetes' defaults filled in."""

    scaleUp: ScalingRules = ScalingRules.model_validate(DEFAULT_UP)
    scaleDown: ScalingRules = ScalingRules.model_validate(DEFAULT_DOWN)


class Fallback(_Read):
    """The value that KEDA reports to the HPA while a trigger fails."""

    failureThreshold: int
    replicas: int
    behavior: Literal[
        "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
    ] = "static"


class Trigger(_Read):
    """A Prometheus trigger. The trigger's threshold is the HPA's AverageValue."""

    name: str
    query: str
    threshold: float = Field(gt=0)
    activationThreshold: float = 0.0
    ignoreNullValues: bool = True


class AutoscalerRules(_Read):
    """A ScaledObject."""

    pollingInterval: float = 30.0
    cooldownPeriod: float = 300.0
    minReplicaCount: int = 0
    maxReplicaCount: int = 100
    fallback: Fallback | None = None
    behavior: Behavior = Behavior()
    triggers: tuple[Trigger, ...]


class WorkerRules(_Read):
    """Rules from the manifests for workers that serve one or more models."""

    models: tuple[str, ...]
    slug: str
    autoscaler: AutoscalerRules
    max_surge: str
    max_unavailable: str
    """Number or percentage of pods that may be unavailable during a rollout."""
    drain_s: float
    """Seconds that a stopping worker allows for its running batches."""
    processes: int = 1
    """Model processes per worker."""
    spread_over_nodes: bool
    """True if a model's pods prefer to run on different nodes."""


class AlertRules(_Read):
    """An alert, as created by Terraform."""

    query: str
    duration_s: float
    """How long the query must return a series before the alert fires."""
    evaluation_interval_s: float


def read_alert(key: str) -> AlertRules:
    """Returns the deployed alert with this key."""
    alert = json.loads(ALERTS_FILE.read_text(encoding="utf-8"))[key]
    return AlertRules(
        query=alert["query"],
        duration_s=float(alert["duration"].removesuffix("s")),
        evaluation_interval_s=float(alert["evaluation_interval"].removesuffix("s")),
    )


def read_rules(
    catalog: Catalog, models_file: Path, deployment: Deployment
) -> dict[str, WorkerRules]:
    """Returns the rules for a region's workers, by group name.

    Raises:
        ConfigurationError: the overlay can't be written, or has an unsupported field.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-rules-") as folder:
        out = Path(folder) / "overlay"
        write_overlay(out, catalog, models_file, deployment)
        return {
            group.name: _worker_rules(group, out / f"worker-{slug(group.name)}")
            for group in catalog.worker_groups
            if not isinstance(group.models[0], Revision)
            and (deployment.models is None or group.models[0].name in deployment.models)
        }


def _worker_rules(group: WorkerGroup, folder: Path) -> WorkerRules:
    objects = render_folder(folder)
    deployment = _find_one(objects, "Deployment")["spec"]
    update = (deployment.get("strategy") or {}).get("rollingUpdate") or {}
    pod = deployment["template"]["spec"]
    settings = _settings(folder)
    preferred = ((pod.get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "preferredDuringSchedulingIgnoredDuringExecution"
    )
    try:
        return WorkerRules(
            models=tuple(model.name for model in group.models),
            slug=slug(group.name),
            autoscaler=autoscaler_rules(_find_one(objects, "ScaledObject")),
            max_surge=str(update.get("maxSurge", "25%")),
            max_unavailable=str(update.get("maxUnavailable", "25%")),
            drain_s=float(settings["PENSTOCK_DRAIN_S"]),
            processes=int(settings["PENSTOCK_PROCESSES"]),
            spread_over_nodes=bool(preferred),
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"rules of {group.name}: {where}: {first['msg']}", field=where
        ) from error


def autoscaler_rules(scaled_object: Document) -> AutoscalerRules:
    """Returns the rules of a ScaledObject.

    Raises:
        ConfigurationError: the ScaledObject uses an unsupported feature.
    """
    spec = scaled_object["spec"]
    advanced = spec.get("advanced") or {}
    if advanced.get("scalingModifiers") or spec.get("idleReplicaCount") is not None:
        raise ConfigurationError(
            "the ScaledObject uses scalingModifiers or idleReplicaCount, which can't be simulated"
        )
    for trigger in spec["triggers"]:
        if trigger["type"] != "prometheus" or trigger.get("metricType", "AverageValue") != (
            "AverageValue"
        ):
            raise ConfigurationError(
                f"trigger {trigger.get('name')}: only prometheus triggers with AverageValue can "
                "be simulated"
            )
    config = advanced.get("horizontalPodAutoscalerConfig") or {}
    policy = config.get("behavior") or {}
    behavior = {
        "scaleUp": DEFAULT_UP | (policy.get("scaleUp") or {}),
        "scaleDown": DEFAULT_DOWN | (policy.get("scaleDown") or {}),
    }
    triggers = [
        {"name": trigger.get("name", f"trigger-{number}")} | trigger["metadata"]
        for number, trigger in enumerate(spec["triggers"])
    ]
    return AutoscalerRules.model_validate(spec | {"behavior": behavior, "triggers": triggers})


def _kustomization(folder: Path) -> Document:
    text = (folder / "kustomization.yaml").read_text(encoding="utf-8")
    document: Document = yaml.load(text, _LOADER)
    return document


def _settings(folder: Path) -> dict[str, str]:
    kustomization = _kustomization(folder)
    literals = [
        literal
        for config in kustomization["configMapGenerator"]
        for literal in config.get("literals", [])
    ]
    return dict(literal.split("=", 1) for literal in literals)


def _find_one(objects: list[Document], kind: str) -> Document:
    matching = [candidate for candidate in objects if candidate["kind"] == kind]
    if len(matching) != 1:
        raise ConfigurationError(
            f"a worker's overlay must have one object of kind {kind}, got {len(matching)}"
        )
    return matching[0]


def render_folder(folder: Path) -> list[Document]:
    """Returns a Kustomize folder's objects, without added names, labels, and namespaces."""
    kustomization = _kustomization(folder)
    objects = list(_resources(folder, kustomization))
    for component in kustomization.get("components", []):
        _apply(folder / component, objects)
    _patch(kustomization, objects)
    return objects


def _resources(folder: Path, kustomization: Document) -> Iterator[Document]:
    for name in kustomization.get("resources", []):
        path = folder / name
        if path.is_dir():
            yield from render_folder(path)
        else:
            yield from yaml.load_all(path.read_text(encoding="utf-8"), _LOADER)


def _apply(component: Path, objects: list[Document]) -> None:
    kustomization = _kustomization(component)
    objects += _resources(component, kustomization)
    _patch(kustomization, objects)


def _patch(kustomization: Document, objects: list[Document]) -> None:
    for entry in kustomization.get("patches", []):
        patch = yaml.load(entry["patch"], _LOADER)
        if not isinstance(patch, dict):
            continue  # JSON 6902, which only network policies use
        target = entry.get("target") or {
            "kind": patch["kind"],
            "name": patch["metadata"]["name"],
        }
        for number, base in enumerate(objects):
            if base["kind"] == target["kind"] and target.get("name") in (
                None,
                base["metadata"]["name"],
            ):
                by_name = base["apiVersion"].partition("/")[0] in ("v1", "apps")
                changed = {key: value for key, value in patch.items() if key != "metadata"}
                objects[number] = _merge(base, changed, by_name=by_name)


def _merge(base: Any, patch: Any, *, by_name: bool) -> Any:
    """Returns a strategic merge.

    Lists in built-in Kubernetes kinds are merged by name, and other lists are replaced.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = _merge(base[key], value, by_name=by_name) if key in base else value
        return merged
    if by_name and _is_named(base) and _is_named(patch):
        names = {element["name"]: element for element in base}
        for element in patch:
            known = names.get(element["name"])
            names[element["name"]] = (
                element if known is None else _merge(known, element, by_name=True)
            )
        return list(names.values())
    return patch


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(element, dict) and "name" in element for element in value
    )


Rules = Mapping[str, Mapping[str, WorkerRules]]
"""Rules by region and model."""


def read_deployed_rules(
    scenario: Scenario, models_file: Path | None = None, profiles: Profiles = ()
) -> tuple[Catalog, Rules]:
    """Returns a scenario's catalog and the rules that would be deployed for it.

    Raises:
        ConfigurationError: the catalog can't be read, or one of the scenario's models is missing.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-simulate-") as folder:
        path = models_file or scenario.catalog
        if not isinstance(path, Path):
            entries: dict[str, Any] = {"models": list(path)}
            if scenario.workers:
                entries["workers"] = list(scenario.workers)
            path = Path(folder) / "models.yaml"
            path.write_text(yaml.safe_dump(entries), encoding="utf-8")
        catalog = read_catalog(path)
        known = {model.name: model for model in catalog.models}
        for name, load in scenario.models.items():
            if name not in known:
                raise ConfigurationError(f"models: {name!r} is not in the catalog", field="models")
            check_work(known[name], load, f"models.{name}")
        deployments = {region: _deployment(scenario, region) for region in scenario.regions}
        return with_served_batches(catalog, profiles), {
            region: read_rules(catalog, path, deployment)
            for region, deployment in deployments.items()
        }


def _deployment(scenario: Scenario, region: str) -> Deployment:
    """Returns a region's deployment. Values that do not affect the rules are placeholders."""
    return Deployment(
        project="simulated",
        region=region,
        namespace="penstock",
        dataset="simulated",
        objects_url="gs://simulated",
        redis_url="redis://10.0.0.2",
        records_url="redis://10.0.0.2",
        redis_cidrs=("10.0.0.0/29",),
        models=tuple(scenario.models),
        spot=scenario.cluster.spot,
        overflow=None,
        compute_classes=False,
        image="penstock-worker:simulated",
        buffer=scenario.cluster.buffer,
    )
