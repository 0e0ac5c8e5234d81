"""Writes what a class of GPU nodes needs in a cluster: a ComputeClass and warm places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.kubernetes.deployment import Deployment, GpuType, gpu_class
from infra.kubernetes.kustomization import (
    deployment_patch,
    node_affinity,
    path_up_to,
    write_kustomization,
)
from infra.kubernetes.placement import compute_class, share_of
from shared.catalog_entry import Gpu


def write_gpu_class(
    out: Path, gpu: Gpu, deployment: Deployment, gpu_types: dict[str, GpuType]
) -> list[str]:
    """Writes a class of GPU nodes: its ComputeClass, and the places that are kept warm on it.

    Args:
        out: the overlay.
        gpu: the GPU of the class, as models ask for it.
        deployment: where and with what.
        gpu_types: the known GPU types by name.

    Returns:
        The names of the folders that were written.
    """
    name, folders = gpu_class(gpu), []
    if deployment.compute_classes:
        folders.append(f"compute-class-{name}")
        folder = out / folders[-1]
        folder.mkdir()
        patch = compute_class(gpu, deployment, gpu_types)
        # No namespace: a ComputeClass has none, which Kustomize can't know.
        write_kustomization(
            folder, [path_up_to(folder, "compute-class")], nameSuffix=f"-{name}", patches=[patch]
        )
    if deployment.buffer:
        kind = "capacity-buffer" if deployment.capacity_buffers else "balloon"
        folders.append(f"{kind}-{name}")
        folder = out / folders[-1]
        folder.mkdir()
        patches = _buffer_patches(gpu, deployment, gpu_types)
        write_kustomization(
            folder,
            [path_up_to(folder, f"buffers/{kind}")],
            namespace=deployment.namespace,
            nameSuffix=f"-{name}",
            labels=[
                {
                    "pairs": {"penstock.dev/gpu": name},
                    "includeSelectors": True,
                    "includeTemplates": True,
                }
            ],
            patches=patches,
        )
    return folders


def _buffer_patches(
    gpu: Gpu, deployment: Deployment, gpu_types: dict[str, GpuType]
) -> list[dict[str, Any]]:
    """A placeholder has the size and nodes of a worker, except nodes for overflow."""
    share = share_of(gpu, gpu_types) | {"nvidia.com/gpu": "1"}
    pod: dict[str, Any] = {"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]}
    if deployment.compute_classes:
        pod["nodeSelector"] = {"cloud.google.com/compute-class": f"workers-{gpu_class(gpu)}"}
    else:
        pod["nodeSelector"] = {"penstock.dev/gpu": gpu_class(gpu)}
        pod["affinity"] = {"nodeAffinity": node_affinity((gpu_types[gpu.type].accelerator,))}
    limits = {"nvidia.com/gpu": "1", "memory": share["memory"]}
    if not deployment.capacity_buffers:
        pod["containers"] = [
            {"name": "balloon", "resources": {"requests": share, "limits": limits}}
        ]
        return [deployment_patch("balloon", pod, replicas=deployment.buffer)]
    pod["containers"] = [{"name": "place", "resources": {"requests": share, "limits": limits}}]
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "buffer"},
            "template": {"spec": pod},
        },
        {
            "apiVersion": "autoscaling.x-k8s.io/v1beta1",
            "kind": "CapacityBuffer",
            "metadata": {"name": "buffer"},
            "spec": {"replicas": deployment.buffer},
        },
    ]
