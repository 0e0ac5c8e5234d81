"""Where a worker gets the weights of a hub model: from a mounted bucket, or from the hub itself.

The bucket has what `penstock weights prefetch` copied, in the layout of
workers/models/prefetched.py. Cloud Storage FUSE mounts one model's part of it into the pod, through
a sidecar that GKE adds. Its file cache is on the node's disk, and several downloads fill it at
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.kubernetes.deployment import Deployment
from shared.catalog import Model

HUB = "hf:"
WEIGHTS_DIR = "/var/cache/penstock-weights"
TOKEN_DIR, TOKEN_FILE = "/var/run/penstock-hub", "token"
CACHE_VOLUME = "gke-gcsfuse-cache"
"""The sidecar takes a volume of this name for its file cache."""
SIDECAR_CPU_M, SIDECAR_MIB = 100, 256
"""What the sidecar asks for. The worker beside it asks for so much less."""
CACHE_SHARE = 0.75
"""Of the worker's disk, for the file cache. The rest is for what the worker writes."""


@dataclass(frozen=True)
class Weights:
    """What a pod has so that its worker finds weights."""

    annotations: dict[str, str]
    settings: dict[str, str]
    mounts: tuple[dict[str, Any], ...]
    volumes: tuple[dict[str, Any], ...]
    has_sidecar: bool = False


NOTHING = Weights({}, {}, (), ())


def weights_of(model: Model, deployment: Deployment, disk_mib: int) -> Weights:
    """How one model's worker gets its weights.

    Args:
        model: only those of the hub need anything.
        deployment: whether they were prefetched, and whether there is a token for the hub.
        disk_mib: the worker's part of the node's disk.
    """
    if not model.source.startswith(HUB) or deployment.is_outside:
        return NOTHING
    if deployment.weights_bucket:
        return _mounted(model.source.removeprefix(HUB), deployment.weights_bucket, disk_mib)
    return _with_token() if deployment.hub_token else NOTHING


def _mounted(repository: str, bucket: str, disk_mib: int) -> Weights:
    cache_mib = int(disk_mib * CACHE_SHARE)
    options = (
        "implicit-dirs",
        f"only-dir=hub/{repository}",
        f"file-cache:max-size-mb:{cache_mib}",
        "file-cache:enable-parallel-downloads:true",
        "file-cache:cache-file-for-range-read:true",
        # Copies do not change while a worker runs.
        "metadata-cache:ttl-secs:-1",
    )
    attributes = {"bucketName": bucket, "mountOptions": ",".join(options)}
    annotations = {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-request": f"{SIDECAR_CPU_M}m",
        "gke-gcsfuse/cpu-limit": "0",
        "gke-gcsfuse/memory-request": f"{SIDECAR_MIB}Mi",
        "gke-gcsfuse/memory-limit": "1Gi",
        # Its cache is on a volume, which the pod's own limit counts.
        "gke-gcsfuse/ephemeral-storage-request": "16Mi",
        "gke-gcsfuse/ephemeral-storage-limit": "0",
    }
    path = f"{WEIGHTS_DIR}/hub/{repository}"
    volumes = (
        {
            "name": "weights",
            "csi": {
                "driver": "gcsfuse.csi.storage.gke.io",
                "readOnly": True,
                "volumeAttributes": attributes,
            },
        },
        {"name": CACHE_VOLUME, "emptyDir": {"sizeLimit": f"{disk_mib}Mi"}},
    )
    mounts = ({"name": "weights", "mountPath": path, "readOnly": True},)
    return Weights(annotations, {"PENSTOCK_WEIGHTS_DIR": WEIGHTS_DIR}, mounts, volumes, True)


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
    # The path, not the token: an environment is shown to whoever may read the pod.
    settings = {"HF_TOKEN_PATH": f"{TOKEN_DIR}/{TOKEN_FILE}"}
    return Weights({}, settings, (mount,), (volume,))


def hub_token_patch(deployment: Deployment) -> dict[str, Any]:
    """Which secret the SecretProviderClass of infra/kubernetes/hub-token reads."""
    secret = f"projects/{deployment.project}/secrets/{deployment.hub_token}/versions/latest"
    return {
        "apiVersion": "secrets-store.csi.x-k8s.io/v1",
        "kind": "SecretProviderClass",
        "metadata": {"name": "hub-token"},
        "spec": {"parameters": {"secrets": f"- resourceName: {secret}\n  path: {TOKEN_FILE}\n"}},
    }
