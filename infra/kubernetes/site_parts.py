"""The parts around the API and the workers off Google: servers, policies, ingress, volume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.kustomization import image_override, path_up_to, write_kustomization
from infra.kubernetes.site import (
    BucketObjects,
    EmbeddedBroker,
    EmbeddedRedis,
    EmbeddedRows,
    GivenRedis,
    Ingress,
    RabbitBroker,
    SelfHostedSite,
    SiteVolume,
    VolumeObjects,
)

TREE = "self-hosted"
CONTAINER = "/spec/template/spec/containers/0"
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The label of each namespace that has its name."""
REDIS_DATA_PERCENT = 60
"""Percentage of the pod's memory for data. The rest is for clients, and for changes while the file
is rewritten.
"""


def server_patches(site: SelfHostedSite) -> dict[str, list[dict[str, Any]]]:
    """The servers that run there by name, with JSON patches (RFC 6902) of each StatefulSet."""
    found: dict[str, list[dict[str, Any]]] = {}
    if isinstance(site.broker, EmbeddedBroker):
        found["pubsub"] = _volume_patch(site.broker.volume)
        if site.broker.fsync:
            found["pubsub"].append({"op": "add", "path": f"{CONTAINER}/args/-", "value": "--fsync"})
    if isinstance(site.rows, EmbeddedRows):
        found["bigquery"] = _volume_patch(site.rows.volume)
    if isinstance(site.redis, EmbeddedRedis):
        memory, mib = site.redis.memory, site.redis.memory_mib * REDIS_DATA_PERCENT // 100
        found["redis"] = [
            *_volume_patch(site.redis.volume),
            *(
                {"op": "add", "path": f"{CONTAINER}/args/-", "value": word}
                for word in ("--maxmemory", f"{mib}mb")
            ),
            {"op": "replace", "path": f"{CONTAINER}/resources/requests/memory", "value": memory},
            {"op": "replace", "path": f"{CONTAINER}/resources/limits/memory", "value": memory},
        ]
    return found


def _volume_patch(volume: SiteVolume) -> list[dict[str, Any]]:
    spec = "/spec/volumeClaimTemplates/0/spec"
    patch = [{"op": "replace", "path": f"{spec}/resources/requests/storage", "value": volume.size}]
    if volume.storage_class is not None:
        found = {"op": "add", "path": f"{spec}/storageClassName", "value": volume.storage_class}
        patch.append(found)
    return patch


def write_server(
    folder: Path, name: str, site: SelfHostedSite, patch: list[dict[str, Any]]
) -> None:
    """Writes the folder of one server, with its JSON patch."""
    folder.mkdir()
    image = ("penstock-redis", site.images.redis)
    write_kustomization(
        folder,
        [path_up_to(folder, f"{TREE}/{name}")],
        namespace=site.namespace,
        images=[
            image_override(
                *(image if name == "redis" else ("penstock-servers", site.images.servers))
            )
        ],
        patches=[{"target": {"kind": "StatefulSet", "name": name}, "patch": yaml.safe_dump(patch)}],
    )


def write_network(folder: Path, site: SelfHostedSite) -> None:
    """Writes the folder of network policies, with the private addresses that the site names."""
    folder.mkdir()
    rules = []
    if isinstance(site.broker, RabbitBroker):
        rules.append(_egress(site.broker.networks, site.broker.port))
    if isinstance(site.redis, GivenRedis):
        rules.append(_egress(site.redis.networks, site.redis.port))
    if isinstance(site.objects, BucketObjects) and site.objects.networks:
        rules.append(_egress(site.objects.networks, site.objects.port))
    patches = []
    if rules:
        added = [{"op": "add", "path": "/spec/egress/-", "value": rule} for rule in rules]
        patches.append(_policy_patch("clients", added))
    if isinstance(site.broker, RabbitBroker):
        # Nothing is pushed to the functions there, and they report what waits in the queues.
        source = [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "monitoring"}}}]
        found = {"op": "replace", "path": "/spec/ingress/0/from", "value": source}
        patches.append(_policy_patch("functions", [found]))
    write_kustomization(
        folder,
        [path_up_to(folder, f"{TREE}/network")],
        namespace=site.namespace,
        patches=patches,
    )


def _policy_patch(name: str, patch: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "target": {"kind": "NetworkPolicy", "name": name},
        "patch": yaml.safe_dump(patch),
    }


def _egress(networks: Sequence[str], port: int) -> dict[str, Any]:
    to = [{"ipBlock": {"cidr": network}} for network in networks]
    return {"to": to, "ports": [{"port": port, "protocol": "TCP"}]}


def write_ingress(folder: Path, namespace: str, ingress: Ingress) -> None:
    """Writes the folder of the way in."""
    folder.mkdir()
    way_in = [
        {"op": "add", "path": "/metadata/annotations", "value": ingress.annotations},
        {"op": "replace", "path": "/spec/ingressClassName", "value": ingress.class_name},
        {"op": "replace", "path": "/spec/tls/0/hosts/0", "value": ingress.host},
        {"op": "replace", "path": "/spec/tls/0/secretName", "value": ingress.tls_secret},
        {"op": "replace", "path": "/spec/rules/0/host", "value": ingress.host},
    ]
    label = {NAMESPACE_NAME: ingress.namespace}
    source = "/spec/ingress/0/from/0/namespaceSelector/matchLabels"
    policy = [{"op": "replace", "path": source, "value": label}]
    write_kustomization(
        folder,
        [path_up_to(folder, f"{TREE}/ingress")],
        namespace=namespace,
        patches=[
            {"target": {"kind": "Ingress"}, "patch": yaml.safe_dump(way_in)},
            {"target": {"kind": "NetworkPolicy"}, "patch": yaml.safe_dump(policy)},
        ],
    )


def objects_claim(namespace: str, objects: VolumeObjects) -> dict[str, Any]:
    """The volume that all pods share."""
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": objects.volume.size}},
    }
    if objects.volume.storage_class is not None:
        spec["storageClassName"] = objects.volume.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "objects", "namespace": namespace},
        "spec": spec,
    }
