"""Writes the Kustomize overlay of a region: one folder per model of the catalog.

Kustomize does the rest: `kubectl kustomize OUT` renders it, `kubectl apply -k OUT` puts it into a
cluster, and the Terraform stage `workloads` takes the rendered file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.autoscaling import hpa_patch, keda_patch
from infra.kubernetes.deployment import Deployment, GpuType, read_gpu_types
from infra.kubernetes.gpu_nodes import write_gpu_class
from infra.kubernetes.identity import CREDENTIALS_FILE, credentials, identity_settings, token_volume
from infra.kubernetes.kustomization import (
    deployment_patch,
    image_override,
    node_affinity,
    path_up_to,
    write_kustomization,
)
from infra.kubernetes.placement import Placement, leave_room, place
from infra.kubernetes.weights import (
    SIDECAR_CPU_M,
    SIDECAR_MIB,
    Weights,
    hub_token_patch,
    weights_of,
)
from shared.catalog import Catalog, Model
from shared.errors import ConfigurationError
from shared.kubernetes_names import slug

MODELS_FILE = "/etc/penstock/models.yaml"
CACHE_DIR, SPOOL_DIR = "/var/cache/penstock", "/var/spool/penstock"
HEALTH_PORT = 8081


def write_overlay(out: Path, catalog: Catalog, models_file: Path, deployment: Deployment) -> None:
    """Writes the overlay, and replaces an existing one.

    Args:
        out: the folder. Files of an earlier run are deleted.
        catalog: the models to run workers of.
        models_file: where it was read. Each worker gets its own entry, so that a change restarts no
            other.
        deployment: where and with what.

    Raises:
        ConfigurationError: a model that is to run there is not in the catalog, or `out` is a folder
            that is no overlay.
    """
    models = _chosen(catalog, deployment)
    clear_overlay(out)
    gpu_types = read_gpu_types()
    entries = {
        entry["name"]: entry
        for entry in yaml.safe_load(models_file.read_text(encoding="utf-8"))["models"]
    }
    folders = []
    for model in models:
        name = slug(model.name)
        _write_worker(
            out / f"worker-{name}", model, entries[model.public_name], deployment, gpu_types
        )
        folders.append(f"worker-{name}")
    if not deployment.is_outside:
        for gpu in dict.fromkeys(model.gpu for model in models if model.gpu.type != "none"):
            folders += write_gpu_class(out, gpu, deployment, gpu_types)
        if deployment.hub_token:
            folders.append(_write_hub_token(out / "hub-token", deployment))
    _write_cluster(out / "cluster", deployment)
    write_kustomization(out, ["cluster", *folders], patches=[])


def _chosen(catalog: Catalog, deployment: Deployment) -> list[Model]:
    if deployment.models is None:
        return list(catalog.deployed)
    chosen = [model for model in catalog.deployed if model.public_name in deployment.models]
    if missing := set(deployment.models) - {model.name for model in chosen}:
        raise ConfigurationError(
            f"models of {deployment.region} are not in the catalog: {', '.join(sorted(missing))}"
        )
    return chosen


def _write_cluster(folder: Path, deployment: Deployment) -> None:
    """Namespace, priorities and network policies.

    The third rule of the workers' policy is for Redis.
    """
    folder.mkdir()
    to = [{"ipBlock": {"cidr": cidr}} for cidr in deployment.redis_cidrs]
    redis = [{"op": "replace", "path": "/spec/egress/2/to", "value": to}]
    patch = {"target": {"kind": "NetworkPolicy", "name": "workers"}, "patch": yaml.safe_dump(redis)}
    components = ["components/cluster-outside"] if deployment.is_outside else []
    write_kustomization(
        folder,
        [path_up_to(folder, "cluster")],
        components=[path_up_to(folder, component) for component in components],
        namespace=deployment.namespace,
        patches=[patch],
    )


def _write_hub_token(folder: Path, deployment: Deployment) -> str:
    folder.mkdir()
    write_kustomization(
        folder,
        [path_up_to(folder, "hub-token")],
        namespace=deployment.namespace,
        patches=[hub_token_patch(deployment)],
    )
    return folder.name


def clear_overlay(out: Path) -> None:
    """Empties the folder of an overlay, or makes it.

    Raises:
        ConfigurationError: it is a folder that is no overlay.
    """
    if out.exists() and any(out.iterdir()):
        if not (out / "kustomization.yaml").is_file():
            raise ConfigurationError(f"{out} holds something else than an overlay")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)


def _write_worker(
    folder: Path,
    model: Model,
    entry: dict[str, Any],
    deployment: Deployment,
    gpu_types: dict[str, GpuType],
) -> None:
    placement, name = place(model, deployment, gpu_types), slug(model.name)
    weights = weights_of(model, deployment, placement.disk_mib)
    components = [*placement.components]
    patches = [_worker_patch(model, placement, weights, deployment)]
    folder.mkdir()
    (folder / "models.yaml").write_text(
        yaml.safe_dump({"models": [entry]}, sort_keys=False), encoding="utf-8"
    )
    settings = worker_settings(model, deployment) | placement.settings | weights.settings
    configs: list[dict[str, Any]] = [
        {"name": "models", "files": ["models.yaml"]},
        {
            "name": "settings",
            "literals": [f"{key}={value}" for key, value in sorted(settings.items())],
        },
    ]
    if deployment.audience:
        components.append("outside")
        (folder / CREDENTIALS_FILE).write_text(credentials(deployment.audience), encoding="utf-8")
        configs.append({"name": "identity", "files": [CREDENTIALS_FILE]})
    if deployment.is_scaled:
        by_keda = deployment.autoscaler == "keda"
        components.append(deployment.autoscaler)
        if by_keda and not deployment.is_outside:
            components.append("keda-google")
        patches.append(
            keda_patch(model, name, deployment) if by_keda else hpa_patch(model, name, deployment)
        )
    write_kustomization(
        folder,
        [path_up_to(folder, "worker")],
        components=[path_up_to(folder, f"components/{component}") for component in components],
        namespace=deployment.namespace,
        nameSuffix=f"-{name}",
        labels=[
            {
                "pairs": {"penstock.dev/model": name},
                "includeSelectors": True,
                "includeTemplates": True,
            }
        ],
        images=[image_override("penstock-worker", deployment.image)],
        configMapGenerator=configs,
        patches=patches,
    )


def worker_settings(model: Model, deployment: Deployment) -> dict[str, str]:
    """The environment of a worker, besides what depends on its node."""
    settings = {
        "HF_HOME": f"{CACHE_DIR}/hub",
        "HOME": "/tmp",
        "PENSTOCK_ARTIFACTS_DIR": f"{CACHE_DIR}/artifacts",
        "PENSTOCK_DATASET": deployment.dataset,
        "PENSTOCK_HEALTH_HOST": "0.0.0.0",
        "PENSTOCK_HEALTH_PORT": str(HEALTH_PORT),
        "PENSTOCK_MODEL": model.name,
        "PENSTOCK_MODELS_DIR": f"{CACHE_DIR}/models",
        "PENSTOCK_MODELS_FILE": MODELS_FILE,
        "PENSTOCK_OBJECTS_URL": deployment.objects_url,
        "PENSTOCK_PROJECT": deployment.project,
        "PENSTOCK_RECORDS_URL": deployment.records_url,
        "PENSTOCK_REDIS_URL": deployment.redis_url,
        "PENSTOCK_REGION": deployment.region,
        "PENSTOCK_SPOOL_DIR": SPOOL_DIR,
    }
    settings |= deployment.traces | deployment.settings
    return settings | (identity_settings(deployment.project) if deployment.audience else {})


def _worker_patch(
    model: Model, placement: Placement, weights: Weights, deployment: Deployment
) -> dict[str, Any]:
    resources = placement.resources
    if weights.has_sidecar:
        resources = leave_room(resources, SIDECAR_CPU_M, SIDECAR_MIB)
    container: dict[str, Any] = {"name": "worker", "resources": resources}
    if weights.mounts:
        container["volumeMounts"] = list(weights.mounts)
    volumes = list(weights.volumes)
    if placement.cache_gib is not None:
        volumes.append({"name": "cache", "emptyDir": {"sizeLimit": f"{placement.cache_gib}Gi"}})
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": placement.grace_s,
        "containers": [container],
    }
    if placement.node_selector:
        pod["nodeSelector"] = placement.node_selector
    if placement.accelerators:
        pod["affinity"] = {"nodeAffinity": node_affinity(placement.accelerators)}
    if deployment.audience:
        volumes.append(token_volume(deployment.audience))
    if volumes:
        pod["volumes"] = volumes
    if deployment.is_outside:
        # With an autoscaler, each apply would take its count back.
        count = {} if deployment.is_scaled else {"replicas": max(1, model.replicas.min)}
        return deployment_patch("worker", pod, **count)
    patch = deployment_patch("worker", pod)
    if weights.annotations:
        patch["spec"]["template"]["metadata"] = {"annotations": weights.annotations}
    return patch
