"""Writes a region's Kustomize overlay: one folder per worker and per GPU node class.

Kustomize does the rest: `kubectl kustomize OUT` renders it, `kubectl apply -k OUT` applies it to a
cluster, and the Terraform stage `workloads` reads the rendered file.

Each GPU node class gets a ComputeClass and warm places. Workers outside Google have a Kubernetes
token that is exchanged for a Google token (RFC 8693). The cluster's API server signs the Kubernetes
token, the kubelet renews it, and Google checks it against the issuer in
infra/terraform/platform/outside.tf. No key is created, copied, or stored anywhere.

A worker gets a Hub model's weights from a mounted bucket, or from the Hub itself. The bucket
contains copies made by `penstock weights prefetch`, in the layout of workers/models/source.py.
Cloud Storage FUSE mounts one model's portion of it in the pod, through a sidecar that GKE adds. The
sidecar's file cache is on the node's disk and is filled by several downloads at once. Kernels that
a worker compiles for its GPU are stored in the same bucket through the same mount
(workers/models/kernel_store.py).
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.autoscaling import keda_patch
from infra.kubernetes.deployment import Deployment, GpuType, gpu_class, read_gpu_types
from infra.kubernetes.kustomization import (
    deployment_patch,
    image_override,
    json_patch,
    label_of_pods,
    node_affinity,
    replace_value,
    write_kustomization,
    write_parts,
)
from infra.kubernetes.placement import Placement, compute_class, leave_room, place, share_of
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Model, WorkerGroup
from shared.models.catalog_file import inline_interfaces
from shared.models.class_variables import SecretReference
from shared.models.entry import DEFAULT_STARTUP_S, Gpu
from shared.models.entry_fields import hub_repository
from shared.models.kubernetes_names import slug

BUCKETS = "gcsfuse.csi.storage.gke.io"
"""Driver for volumes backed by buckets."""
WEIGHTS_DIR = "/var/cache/penstock-weights"
KERNELS_DIR, KERNELS_FOLDER = "/var/cache/penstock-kernels", "kernels"
WORKER_ID = 10001
"""The worker's user and group ID (infra/kubernetes/worker/deployment.yaml)."""
TOKEN_DIR, TOKEN_FILE = "/var/run/penstock", "token"
CACHE_VOLUME = "gke-gcsfuse-cache"
"""The sidecar uses a volume with this name for its file cache."""
STARTUP_PERIOD_S, BASE_STARTUP_TRIES, BASE_PROGRESS_S = 5, 240, 1800
"""The startup probe and the progress deadline in infra/kubernetes/worker/deployment.yaml.

The probe allows 1020 s for weights and measurements, and DEFAULT_STARTUP_S for the models.
"""
SIDECAR_CPU_M, SIDECAR_MIB = 100, 256
"""The sidecar's resource requests. The worker alongside it requests that much less."""
TMP_MIB = 2048
"""Size of `/tmp`, as in infra/kubernetes/worker. A pod that exceeds it is evicted."""
CACHE_SHARE = 0.75
"""Share of the worker's disk for the file cache. The rest is for files that the worker writes."""

CREDENTIALS_DIR = "/etc/penstock-identity"
CREDENTIALS_FILE = "credentials.json"

TOKEN_VALID_S = 3600
"""The kubelet renews a token after four fifths of this time."""

MODELS_FILE = "/etc/penstock/models.yaml"
CACHE_DIR, SPOOL_DIR = "/var/cache/penstock", "/var/spool/penstock"
HEALTH_PORT = 8081


@dataclass(frozen=True)
class Weights:
    """The parts of a pod that make weights available to its worker."""

    annotations: dict[str, str]
    settings: dict[str, str]
    mounts: tuple[dict[str, Any], ...]
    volumes: tuple[dict[str, Any], ...]
    has_sidecar: bool = False


NOTHING = Weights({}, {}, (), ())


def weights_of(models: Sequence[Model], deployment: Deployment, disk_mib: int) -> Weights:
    """Returns where one worker's models get their weights.

    Only models and adapters from the Hub need a source.
    """
    of_hub = [model for model in models if _repositories(model)]
    if not of_hub or deployment.is_outside:
        return NOTHING
    if deployment.weights_bucket:
        repositories = list(
            dict.fromkeys(repository for model in of_hub for repository in _repositories(model))
        )
        mounted = _mount(repositories, deployment.weights_bucket, disk_mib)
        if not any(map(_compiles, models)):
            return mounted
        return _with_kernels(mounted, deployment.weights_bucket)
    return _with_token() if deployment.hub_token else NOTHING


def _repositories(model: Model) -> list[str]:
    """Returns Hub repositories for the model's weights, controls, adapters, and IP-Adapters."""
    sources = [source for source, _ in model.sources.values()]
    sources += [adapter.source for adapter in model.image.adapters.values()]
    return [repository for source in sources if (repository := hub_repository(source))]


def _mount(repositories: Sequence[str], bucket: str, disk_mib: int) -> Weights:
    """Returns a volume for each repository. The volumes share the file-cache disk evenly."""
    annotations = {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-request": f"{SIDECAR_CPU_M}m",
        "gke-gcsfuse/cpu-limit": "0",
        "gke-gcsfuse/memory-request": f"{SIDECAR_MIB}Mi",
        "gke-gcsfuse/memory-limit": "1Gi",
        # Its cache is on a volume, which counts toward the pod's own limit.
        "gke-gcsfuse/ephemeral-storage-request": "16Mi",
        "gke-gcsfuse/ephemeral-storage-limit": "0",
    }
    cache_mib = int(disk_mib * CACHE_SHARE) // len(repositories)
    volumes, mounts = [], []
    for number, repository in enumerate(repositories):
        name = f"weights-{number}" if number else "weights"
        volumes.append(_volume(name, repository, bucket, cache_mib))
        path = f"{WEIGHTS_DIR}/hub/{repository}"
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    volumes.append({"name": CACHE_VOLUME, "emptyDir": {"sizeLimit": f"{disk_mib}Mi"}})
    settings = {"PENSTOCK_WEIGHTS_DIR": WEIGHTS_DIR}
    return Weights(annotations, settings, tuple(mounts), tuple(volumes), True)


def _volume(name: str, repository: str, bucket: str, cache_mib: int) -> dict[str, Any]:
    options = (
        "implicit-dirs",
        f"only-dir=hub/{repository}",
        f"file-cache:max-size-mb:{cache_mib}",
        "file-cache:enable-parallel-downloads:true",
        "file-cache:cache-file-for-range-read:true",
        # The copies don't change while a worker is running.
        "metadata-cache:ttl-secs:-1",
    )
    attributes = {"bucketName": bucket, "mountOptions": ",".join(options)}
    mount = {"driver": BUCKETS, "readOnly": True, "volumeAttributes": attributes}
    return {"name": name, "csi": mount}


def _compiles(model: Model) -> bool:
    is_never = model.image.compile_mode == "never"
    return model.definition.is_compiled and model.gpu.type != "none" and not is_never


def _with_kernels(weights: Weights, bucket: str) -> Weights:
    """Adds a folder in the same bucket for compiled kernels.

    The worker may write only to its model's part (infra/terraform/platform/storage.tf).
    """
    options = (
        "implicit-dirs",
        f"only-dir={KERNELS_FOLDER}",
        f"uid={WORKER_ID}",
        f"gid={WORKER_ID}",
        # Other workers may replace the archive.
        "metadata-cache:ttl-secs:0",
    )
    attributes = {"bucketName": bucket, "mountOptions": ",".join(options)}
    volume = {"name": "kernels", "csi": {"driver": BUCKETS, "volumeAttributes": attributes}}
    return replace(
        weights,
        settings=weights.settings | {"PENSTOCK_KERNELS_DIR": KERNELS_DIR},
        mounts=(*weights.mounts, {"name": "kernels", "mountPath": KERNELS_DIR}),
        volumes=(*weights.volumes, volume),
    )


def _with_token() -> Weights:
    volume = {
        "name": "hub-token",
        "csi": {
            "driver": "secrets-store-gke.csi.k8s.io",
            "readOnly": True,
            "volumeAttributes": {"secretProviderClass": "hub-token"},
        },
    }
    mount = {"name": "hub-token", "mountPath": TOKEN_DIR, "readOnly": True}
    # Contains the path, not the token, because anyone who can read the pod can see its environment.
    settings = {"HF_TOKEN_PATH": f"{TOKEN_DIR}/{TOKEN_FILE}"}
    return Weights({}, settings, (mount,), (volume,))


def hub_token_patch(deployment: Deployment) -> dict[str, Any]:
    """Returns a patch naming the secret that hub-token's SecretProviderClass reads."""
    secret = f"projects/{deployment.project}/secrets/{deployment.hub_token}/versions/latest"
    return {
        "apiVersion": "secrets-store.csi.x-k8s.io/v1",
        "kind": "SecretProviderClass",
        "metadata": {"name": "hub-token"},
        "spec": {"parameters": {"secrets": f"- resourceName: {secret}\n  path: {TOKEN_FILE}\n"}},
    }


def write_gpu_class(
    out: Path, gpu: Gpu, deployment: Deployment, gpu_types: dict[str, GpuType]
) -> list[str]:
    """Writes a GPU node class: its ComputeClass and its warm places."""
    name, folders = gpu_class(gpu), []
    if deployment.compute_classes:
        folders.append(f"compute-class-{name}")
        patch = compute_class(gpu, deployment, gpu_types)
        # No namespace is set, because a ComputeClass is cluster-wide, which Kustomize doesn't know.
        write_parts(out / folders[-1], "compute-class", nameSuffix=f"-{name}", patches=[patch])
    if deployment.buffer:
        folders.append(f"balloon-{name}")
        write_parts(
            out / folders[-1],
            "balloon",
            namespace=deployment.namespace,
            nameSuffix=f"-{name}",
            labels=label_of_pods("penstock.dev/gpu", name),
            patches=[_balloon_patch(gpu, deployment, gpu_types)],
        )
    return folders


def _balloon_patch(
    gpu: Gpu, deployment: Deployment, gpu_types: dict[str, GpuType]
) -> dict[str, Any]:
    """Returns placeholder pods the size of a worker.

    They run on the class's own nodes, not on overflow nodes.
    """
    gpus = {"nvidia.com/gpu": str(gpu.count)}
    share = share_of(gpu, gpu_types) | gpus
    pod: dict[str, Any] = {"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]}
    if deployment.compute_classes:
        pod["nodeSelector"] = {"cloud.google.com/compute-class": f"workers-{gpu_class(gpu)}"}
    else:
        pod["nodeSelector"] = {"penstock.dev/gpu": gpu_class(gpu)}
        pod["affinity"] = {"nodeAffinity": node_affinity((gpu_types[gpu.type].accelerator,))}
    limits = gpus | {"memory": share["memory"]}
    pod["containers"] = [{"name": "balloon", "resources": {"requests": share, "limits": limits}}]
    return deployment_patch("balloon", pod, replicas=deployment.buffer)


def credentials(audience: str) -> str:
    """Returns the configuration file for google-auth (an "external account").

    It contains no secret.

    Args:
        audience: provider in Google's identity pool, as `//iam.googleapis.com/projects/…`.
    """
    external = {
        "type": "external_account",
        "audience": audience,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": f"{TOKEN_DIR}/{TOKEN_FILE}"},
    }
    return json.dumps(external, indent=2) + "\n"


def token_volume(audience: str) -> dict[str, Any]:
    token = {"path": "token", "audience": f"https:{audience}", "expirationSeconds": TOKEN_VALID_S}
    return {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}}


def write_overlay(out: Path, catalog: Catalog, models_file: Path, deployment: Deployment) -> None:
    """Writes the overlay, replacing an existing one.

    Args:
        out: output folder. Files from an earlier run are deleted.
        models_file: the catalog's file. Each worker gets only the entries it needs, so that a
            change does not restart other workers.

    Raises:
        ConfigurationError: a model to run there is not in the catalog, or models that share its
            workers are missing; a worker's models do not fit on its GPU; or `out` is a folder that
            does not contain an overlay.
    """
    groups = _chosen(catalog, deployment)
    gpu_types = read_gpu_types()
    placements = [place(group, deployment, gpu_types) for group in groups]
    with replace_folder(out) as folder:
        document = inline_interfaces(models_file)
        folders = []
        for group, placement in zip(groups, placements, strict=True):
            folders.append(f"worker-{slug(group.name)}")
            entries = _entries_of(group, catalog, document)
            _write_worker(folder / folders[-1], group, entries, deployment, placement)
        if not deployment.is_outside:
            gpus = dict.fromkeys(group.gpu for group in groups if group.gpu.type != "none")
            for gpu in gpus:
                folders += write_gpu_class(folder, gpu, deployment, gpu_types)
            own: dict[str, Any] = {}
            if deployment.hub_token:
                own["hub-token"] = {"patches": [hub_token_patch(deployment)]}
            if gpus:
                image = image_override("penstock-worker", deployment.image)
                own["gpu-nodes"] = {"images": [image]}
            for name, fields in own.items():
                write_parts(folder / name, name, namespace=deployment.namespace, **fields)
            folders += own
        _write_cluster(folder / "cluster", deployment, groups)
        write_kustomization(folder, ["cluster", *folders], patches=[])


def _chosen(catalog: Catalog, deployment: Deployment) -> list[WorkerGroup]:
    if deployment.models is None:
        return list(catalog.worker_groups)
    requested = set(deployment.models)
    if missing := requested - {model.name for model in catalog.deployed}:
        raise ConfigurationError(
            f"models for {deployment.region} are not in the catalog: {', '.join(sorted(missing))}"
        )
    chosen = []
    for group in catalog.worker_groups:
        names = {model.public_name for model in group.models}
        if names <= requested:
            chosen.append(group)
        elif names & requested:
            raise ConfigurationError(
                f"models for {deployment.region}: workers {group.name!r} also require "
                f"{', '.join(sorted(names - requested))}"
            )
    return chosen


def _entries_of(group: WorkerGroup, catalog: Catalog, document: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries that a worker needs: its models, and the flows it continues.

    The worker that finishes a flow step publishes the next one, so it needs the models for all
    steps.
    """
    names = {model.public_name for model in group.models}
    flows = [
        flow for flow in catalog.flows if names & {model.entry_name for model in flow.step_models}
    ]
    names |= {model.entry_name for flow in flows for model in flow.step_models}
    entries = {"models": [entry for entry in document["models"] if entry["name"] in names]}
    if flows:
        of_flows = {flow.name for flow in flows}
        entries["flows"] = [entry for entry in document["flows"] if entry["name"] in of_flows]
    return entries


def _write_cluster(folder: Path, deployment: Deployment, groups: Sequence[WorkerGroup]) -> None:
    """Writes the namespace, priorities and network policies.

    The third rule in the workers' policy is for Redis. On GKE, workers that share a GPU through MPS
    need `hostIPC`, which only the policy level `privileged` allows.
    """
    to = [{"ipBlock": {"cidr": cidr}} for cidr in deployment.redis_cidrs]
    patches = [json_patch("NetworkPolicy", [replace_value("/spec/egress/2/to", to)], "workers")]
    if not deployment.is_outside and any(group.gpu.sharing == "mps" for group in groups):
        enforced = "/metadata/labels/pod-security.kubernetes.io~1enforce"
        patches.append(json_patch("Namespace", [replace_value(enforced, "privileged")]))
    write_parts(
        folder,
        "cluster",
        components=["components/cluster-outside"] if deployment.is_outside else [],
        namespace=deployment.namespace,
        patches=patches,
    )


@contextmanager
def replace_folder(
    out: Path, mark: str = "kustomization.yaml", kind: str = "an overlay"
) -> Iterator[Path]:
    """Yields an empty folder, which replaces an overlay's folder unless the block fails.

    It has the same parent, so that relative paths stay valid.

    Args:
        mark: file that every folder of this kind contains.
        kind: kind of folder, for the error message.

    Raises:
        ConfigurationError: the folder contains something else, or is a file.
    """
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is not a folder")
    if out.exists() and any(out.iterdir()) and not (out / mark).is_file():
        raise ConfigurationError(f"{out} contains something other than {kind}")
    out = out.resolve()
    folder = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_configs(
    folder: Path, entries: dict[str, Any], settings: dict[str, str], deployment: Deployment
) -> list[dict[str, Any]]:
    """Writes the files for a worker's ConfigMaps. Returns their generators."""
    (folder / "models.yaml").write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    literals = [f"{key}={value}" for key, value in sorted(settings.items())]
    configs: list[dict[str, Any]] = [
        {"name": "models", "files": ["models.yaml"]},
        {"name": "settings", "literals": literals},
    ]
    if deployment.audience:
        (folder / CREDENTIALS_FILE).write_text(credentials(deployment.audience), encoding="utf-8")
        configs.append({"name": "identity", "files": [CREDENTIALS_FILE]})
    return configs


def _write_worker(
    folder: Path,
    group: WorkerGroup,
    entries: dict[str, Any],
    deployment: Deployment,
    placement: Placement,
) -> None:
    name = slug(group.name)
    weights = weights_of(group.models, deployment, placement.disk_mib)
    components = [*placement.components]
    patches = [_worker_patch(group, placement, weights, deployment)]
    folder.mkdir()
    settings = worker_settings(group, deployment) | placement.settings | weights.settings
    configs = _write_configs(folder, entries, settings, deployment)
    if deployment.audience:
        components.append("outside")
    if deployment.is_scaled:
        components += ["keda"] if deployment.is_outside else ["keda", "keda-google"]
        patches.append(keda_patch(group, name, deployment, placement.processes))
    write_parts(
        folder,
        "worker",
        components=[f"components/{component}" for component in components],
        namespace=deployment.namespace,
        nameSuffix=f"-{name}",
        labels=label_of_pods("penstock.dev/model", name),
        images=[image_override("penstock-worker", deployment.image)],
        configMapGenerator=configs,
        patches=patches,
    )


def worker_settings(group: WorkerGroup, deployment: Deployment) -> dict[str, str]:
    """Returns a worker's environment, except for settings that depend on its node."""
    settings = {
        "HF_HOME": f"{CACHE_DIR}/hub",
        "HOME": "/tmp",
        "PENSTOCK_ARTIFACTS_DIR": f"{CACHE_DIR}/artifacts",
        "PENSTOCK_DATASET": deployment.dataset,
        "PENSTOCK_HEALTH_HOST": "0.0.0.0",
        "PENSTOCK_HEALTH_PORT": str(HEALTH_PORT),
        "PENSTOCK_MODEL": ",".join(model.name for model in group.models),
        "PENSTOCK_MODELS_DIR": f"{CACHE_DIR}/models",
        "PENSTOCK_MODELS_FILE": MODELS_FILE,
        "PENSTOCK_OBJECTS_URL": deployment.objects_url,
        "PENSTOCK_PROJECT": deployment.project,
        "PENSTOCK_RECORDS_URL": deployment.records_url,
        "PENSTOCK_REDIS_URL": deployment.redis_url,
        "PENSTOCK_REGION": deployment.region,
        "PENSTOCK_SPOOL_DIR": SPOOL_DIR,
    }
    if deployment.rows_url:
        settings["PENSTOCK_ROWS_URL"] = deployment.rows_url
    settings |= deployment.traces | deployment.settings
    if deployment.audience:
        settings["GOOGLE_APPLICATION_CREDENTIALS"] = f"{CREDENTIALS_DIR}/{CREDENTIALS_FILE}"
        settings["GOOGLE_CLOUD_PROJECT"] = deployment.project
    return settings


def _size_volumes(group: WorkerGroup, placement: Placement) -> Iterator[dict[str, Any]]:
    """Yields worker volumes whose size differs from the one in infra/kubernetes/worker."""
    if group.gpu.count > 1:
        # NCCL and the processes of one engine, one per GPU, exchange data there.
        yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{group.gpu.count}Gi"}}
    if placement.cache_gib is not None:
        yield {"name": "cache", "emptyDir": {"sizeLimit": f"{placement.cache_gib}Gi"}}
    classes = [model for model in group.models if model.definition.has_interface]
    if classes:  # each of a class's processes can write a limited amount to /tmp
        process_mib = sum(-(-model.resources.disk_bytes // 2**20) for model in classes)
        tmp_mib = TMP_MIB + process_mib * placement.processes
        yield {"name": "tmp", "emptyDir": {"sizeLimit": f"{tmp_mib}Mi"}}


def _additional_startup_s(group: WorkerGroup, deployment: Deployment) -> int:
    """Returns how many seconds beyond the tree's probe limit the models may take to start."""
    startup_s = float(deployment.settings.get("PENSTOCK_STARTUP_S", 0)) or group.startup_s
    return max(0, math.ceil(startup_s - DEFAULT_STARTUP_S))


def _secret_variables(group: WorkerGroup) -> dict[str, Any]:
    """Returns container variables with the Kubernetes secrets that the worker's classes receive.

    They are not passed as files, because every class in the worker could read those.
    """
    texts = {text for model in group.models for text in model.secrets.values()}
    references = [SecretReference.parse(text) for text in sorted(texts)]
    variables = [
        {
            "name": reference.variable,
            "valueFrom": {
                "secretKeyRef": {"name": reference.parts["secret"], "key": reference.parts["key"]}
            },
        }
        for reference in references
        if reference.kind == "kubernetes"
    ]
    return {"env": variables} if variables else {}


def _worker_patch(
    group: WorkerGroup, placement: Placement, weights: Weights, deployment: Deployment
) -> dict[str, Any]:
    resources = placement.resources
    if weights.has_sidecar:
        resources = leave_room(resources, SIDECAR_CPU_M, SIDECAR_MIB)
    container: dict[str, Any] = {
        "name": "worker",
        "resources": resources,
        **_secret_variables(group),
    }
    spec: dict[str, Any] = {}
    if more_s := _additional_startup_s(group, deployment):
        tries = BASE_STARTUP_TRIES + math.ceil(more_s / STARTUP_PERIOD_S)
        container["startupProbe"] = {"failureThreshold": tries}
        spec["progressDeadlineSeconds"] = BASE_PROGRESS_S + more_s
    if weights.mounts:
        container["volumeMounts"] = list(weights.mounts)
    volumes = [*weights.volumes, *_size_volumes(group, placement)]
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
        # With an autoscaler, each apply would reset the replica count set by the autoscaler.
        spec |= {} if deployment.is_scaled else {"replicas": max(1, group.replicas.min)}
    patch = deployment_patch("worker", pod, **spec)
    if weights.annotations:
        patch["spec"]["template"]["metadata"] = {"annotations": weights.annotations}
    return patch
