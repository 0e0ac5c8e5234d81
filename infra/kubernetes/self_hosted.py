"""`python -m infra.kubernetes.self_hosted`: the overlay for a whole deployment outside Google.

Workers are the same as in every other cluster (overlay.py). The rest consists of the API, the batch
runner, the functions, the row archive, any servers that the site does not provide itself, and the
scrape configuration that lets the autoscaler's queries find our metrics in the site's Prometheus.
This module also provides processes with addresses and the secrets they read, and creates policies,
ingress, and volumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.deployment import Deployment, OwnPrometheus
from infra.kubernetes.kustomization import (
    add_value,
    deployment_patch,
    dump_yaml,
    image_override,
    json_patch,
    replace_value,
    write_kustomization,
    write_parts,
)
from infra.kubernetes.overlay import replace_folder, write_overlay
from infra.kubernetes.placement import time_slicing
from infra.kubernetes.site import (
    BucketObjects,
    EmbeddedBroker,
    EmbeddedRedis,
    EmbeddedRows,
    GivenRedis,
    GoogleBroker,
    Ingress,
    RabbitBroker,
    SelfHostedSite,
    SiteVolume,
    VolumeObjects,
    read_site,
)
from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from shared.models.catalog_file import inline_interfaces, read_catalog

TREE = "self-hosted"
CONTAINER = "/spec/template/spec/containers/0"
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label on each namespace that contains the namespace's name."""
REDIS_DATA_PERCENT = 60
"""Percentage of the pod's memory for data.

The rest is for clients and for changes made while the file is rewritten.
"""

OBJECTS_DIR = "/var/lib/penstock/objects"
CREDENTIALS_DIR = "/etc/penstock-google"
KEYS_URL = "file:///etc/penstock-keys/keys.json"
NO_NETWORK = ("127.0.0.1/32",)
"""Placeholder addresses for an in-cluster Redis, whose pods are selected by label instead."""

CLIENTS = ("api", "batches", "functions", "row-archive")

SCRAPE_FILE = "scrape.yaml"
TIME_SLICING_FILE = "time-slicing.yaml"
INTERVAL = "10s"
"""Scrape interval, the same as in Managed Prometheus. The queries cover a minute of samples."""
_LABEL = "__meta_kubernetes_pod_label_"
_PORT = "__meta_kubernetes_pod_container_port_name"


def server_patches(site: SelfHostedSite) -> dict[str, list[dict[str, Any]]]:
    """Returns JSON patches for the servers and the volume in the cluster, by folder and name."""
    patches: dict[str, list[dict[str, Any]]] = {}
    if isinstance(site.broker, EmbeddedBroker):
        patches["pubsub"] = _volume_patch(site.broker.volume)
        if site.broker.fsync:
            patches["pubsub"].append(add_value(f"{CONTAINER}/args/-", "--fsync"))
    if isinstance(site.rows, EmbeddedRows):
        patches["bigquery"] = _volume_patch(site.rows.volume)
    if isinstance(site.redis, EmbeddedRedis):
        memory, mib = site.redis.memory, site.redis.memory_mib * REDIS_DATA_PERCENT // 100
        patches["redis"] = [
            *_volume_patch(site.redis.volume),
            *(add_value(f"{CONTAINER}/args/-", word) for word in ("--maxmemory", f"{mib}mb")),
            replace_value(f"{CONTAINER}/resources/requests/memory", memory),
            replace_value(f"{CONTAINER}/resources/limits/memory", memory),
        ]
    if isinstance(site.objects, VolumeObjects):
        patches["objects"] = _volume_patch(site.objects.volume, "/spec")
    return patches


def _volume_patch(
    volume: SiteVolume, spec: str = "/spec/volumeClaimTemplates/0/spec"
) -> list[dict[str, Any]]:
    patch = [replace_value(f"{spec}/resources/requests/storage", volume.size)]
    if volume.storage_class is not None:
        patch.append(add_value(f"{spec}/storageClassName", volume.storage_class))
    return patch


def write_network(folder: Path, site: SelfHostedSite) -> None:
    """Writes the folder with network policies, including the site's private addresses."""
    rules = []
    if isinstance(site.broker, RabbitBroker):
        rules.append(_egress(site.broker.networks, site.broker.port))
    if isinstance(site.redis, GivenRedis):
        rules.append(_egress(site.redis.networks, site.redis.port))
    if isinstance(site.objects, BucketObjects) and site.objects.networks:
        rules.append(_egress(site.objects.networks, site.objects.port))
    patches = []
    if rules:
        added = [add_value("/spec/egress/-", rule) for rule in rules]
        patches.append(json_patch("NetworkPolicy", added, "clients"))
    if isinstance(site.broker, RabbitBroker):
        # Nothing is pushed to the functions there; instead, they report queue lengths.
        source = [{"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: "monitoring"}}}]
        operation = replace_value("/spec/ingress/0/from", source)
        patches.append(json_patch("NetworkPolicy", [operation], "functions"))
    write_parts(folder, f"{TREE}/network", namespace=site.namespace, patches=patches)


def _egress(networks: Sequence[str], port: int) -> dict[str, Any]:
    to = [{"ipBlock": {"cidr": network}} for network in networks]
    return {"to": to, "ports": [{"port": port, "protocol": "TCP"}]}


def write_ingress(folder: Path, namespace: str, ingress: Ingress) -> None:
    way_in = [
        add_value("/metadata/annotations", ingress.annotations),
        replace_value("/spec/ingressClassName", ingress.class_name),
        replace_value("/spec/tls/0/hosts/0", ingress.host),
        replace_value("/spec/tls/0/secretName", ingress.tls_secret),
        replace_value("/spec/rules/0/host", ingress.host),
    ]
    source = "/spec/ingress/0/from/0/namespaceSelector/matchLabels"
    policy = [replace_value(source, {NAMESPACE_NAME: ingress.namespace})]
    patches = [json_patch("Ingress", way_in), json_patch("NetworkPolicy", policy)]
    write_parts(folder, f"{TREE}/ingress", namespace=namespace, patches=patches)


def has_archive(site: SelfHostedSite) -> bool:
    return isinstance(site.rows, EmbeddedRows) and site.rows.archive


def worker_deployment(site: SelfHostedSite) -> Deployment:
    redis_url = site.redis.url if isinstance(site.redis, GivenRedis) else "redis://redis:6379/0"
    return Deployment(
        project=site.google.project if site.google else "penstock",
        region=site.region,
        namespace=site.namespace,
        dataset=site.dataset,
        objects_url=_objects_url(site),
        redis_url=redis_url,
        records_url=redis_url,
        redis_cidrs=NO_NETWORK,
        spot=False,
        overflow=None,
        compute_classes=False,
        image=site.images.worker,
        is_self_hosted=True,
        time_slicing=site.time_slicing,
        settings=_endpoints(site),
        prometheus=_prometheus(site),
    )


def _prometheus(site: SelfHostedSite) -> OwnPrometheus | None:
    if site.autoscaling is None:
        return None
    return OwnPrometheus(
        url=site.autoscaling.prometheus,
        labels=series_labels(site),
        has_rabbitmq=isinstance(site.broker, RabbitBroker),
    )


def series_labels(site: SelfHostedSite) -> dict[str, str]:
    labels = site.autoscaling.labels if site.autoscaling is not None else None
    return {"namespace": site.namespace} if labels is None else dict(sorted(labels.items()))


def _objects_url(site: SelfHostedSite) -> str:
    return site.objects.url if isinstance(site.objects, BucketObjects) else f"file://{OBJECTS_DIR}"


def _endpoints(site: SelfHostedSite) -> dict[str, str]:
    """Returns the addresses of servers outside Google, and access to Google's servers."""
    files = {}
    if isinstance(site.broker, EmbeddedBroker):
        files["PENSTOCK_PUBSUB_ENDPOINT"] = "pubsub:8085"
    if isinstance(site.rows, EmbeddedRows):
        files["PENSTOCK_BIGQUERY_ENDPOINT"] = "http://bigquery:9050"
    if has_archive(site):
        files["PENSTOCK_ROWS_URL"] = f"{_objects_url(site)}/usage"
    if site.google is not None:
        files["GOOGLE_APPLICATION_CREDENTIALS"] = f"{CREDENTIALS_DIR}/credentials.json"
        files["GOOGLE_CLOUD_PROJECT"] = site.google.project
    return files


def client_settings(site: SelfHostedSite) -> dict[str, str]:
    """Returns the environment for the API, batch runner, and functions.

    Other variables are set in their images.
    """
    workers = worker_deployment(site)
    settings = {
        "PENSTOCK_DATASET": workers.dataset,
        "PENSTOCK_INVOICE_SELLER": site.invoices.seller,
        "PENSTOCK_INVOICE_TAX_NAME": site.invoices.tax_name,
        "PENSTOCK_INVOICE_TAX_PERCENT": str(site.invoices.tax_percent).removesuffix(".0"),
        "PENSTOCK_KEYS_URL": KEYS_URL,
        "PENSTOCK_METRICS_HOST": "0.0.0.0",
        "PENSTOCK_METRICS_PORT": "9464",
        "PENSTOCK_OBJECTS_URL": workers.objects_url,
        "PENSTOCK_PROJECT": workers.project,
        "PENSTOCK_RECORDS_URL": workers.records_url,
        "PENSTOCK_REDIS_URL": workers.redis_url,
        "PENSTOCK_REGION": workers.region,
    }
    if isinstance(site.broker, GoogleBroker) and site.broker.inbox_pool:
        settings["PENSTOCK_INBOX_POOL"] = str(site.broker.inbox_pool)
        settings["PENSTOCK_INBOX_FIRST"] = str(site.broker.inbox_first)
        settings["PENSTOCK_REPLY_SLOTS"] = str(site.broker.inbox_slots)
    if site.ingress is not None:
        settings["PENSTOCK_PUBLIC_URL"] = f"https://{site.ingress.host}"
        settings["PENSTOCK_TRUSTED_PROXIES"] = ",".join(site.ingress.networks)
    return settings | _endpoints(site)


def secret_of_broker(site: SelfHostedSite) -> list[dict[str, Any]]:
    """Returns the source of the variable that holds RabbitMQ's URL.

    Empty if a different broker is used.
    """
    if not isinstance(site.broker, RabbitBroker):
        return []
    return [{"secretRef": {"name": site.broker.secret}}]


def write_clients(folder: Path, site: SelfHostedSite, models_file: Path) -> None:
    """Writes the folder with the clients that run in the cluster, all with the same settings."""
    names = _running(site)
    folder.mkdir()
    text = yaml.safe_dump(inline_interfaces(models_file), sort_keys=False)
    (folder / "models.yaml").write_text(text, encoding="utf-8")
    settings = [f"{key}={value}" for key, value in sorted(client_settings(site).items())]
    images = {
        "penstock-api": site.images.api,
        "penstock-functions": site.images.functions,
        "penstock-servers": site.images.servers,
    }
    has_rabbitmq = isinstance(site.broker, RabbitBroker)
    components = {"provision": site.has_servers, "pull": has_rabbitmq}
    patches = [_client_patch(name, site) for name in names]
    if has_rabbitmq:
        sources = "/spec/template/spec/initContainers/0/envFrom/-"
        (secret,) = secret_of_broker(site)
        patches.append(json_patch("Deployment", [add_value(sources, secret)], "api"))
    write_parts(
        folder,
        *(f"{TREE}/{name}" for name in names),
        namespace=site.namespace,
        images=[image_override(image, tag) for image, tag in images.items()],
        configMapGenerator=[
            {"name": "models", "files": ["models.yaml"]},
            {"name": "settings", "literals": settings},
        ],
        components=[f"{TREE}/{name}" for name, is_used in components.items() if is_used],
        patches=patches,
    )


def _running(site: SelfHostedSite) -> list[str]:
    has = {
        "batches": site.batches,
        # Google's broker pushes to the functions created by Terraform.
        "functions": not isinstance(site.broker, GoogleBroker),
        "row-archive": has_archive(site),
    }
    return [name for name in CLIENTS if has.get(name, True)]


def _client_patch(name: str, site: SelfHostedSite) -> dict[str, Any]:
    if name == "row-archive":
        return deployment_patch(name, {"containers": [{"name": name}]})
    variables = [
        {"configMapRef": {"name": "settings"}},
        {"secretRef": {"name": site.signing_secret}},
    ]
    container: dict[str, Any] = {"name": name, "envFrom": variables}
    pod: dict[str, Any] = {"containers": [container]}
    if name == "functions":
        container["env"] = [{"name": "PENSTOCK_BILLING_TZ", "value": site.billing_tz}]
    else:
        pod["volumes"] = [{"name": "keys", "secret": {"secretName": site.keys_secret}}]
    if name != "api":
        return deployment_patch(name, pod)
    container["resources"] = {
        "requests": {"cpu": site.api.cpu, "memory": site.api.memory},
        "limits": {"memory": site.api.memory},
    }
    return deployment_patch(name, pod, replicas=site.api.replicas)


def write_scraping(folder: Path, site: SelfHostedSite) -> None:
    """Writes the configuration into the overlay folder. The overlay does not apply it."""
    text = dump_yaml({"scrape_configs": [_job(site)]})
    (folder / SCRAPE_FILE).write_text(text, encoding="utf-8")


def write_time_slicing(folder: Path, catalog: Catalog) -> None:
    """Writes the NVIDIA device plugin configuration into a folder.

    The overlay does not apply it.
    """
    text = dump_yaml(time_slicing(catalog.deployed))
    (folder / TIME_SLICING_FILE).write_text(text, encoding="utf-8")


def _job(site: SelfHostedSite) -> dict[str, Any]:
    chosen = ["penstock-(api|batches|row-archive);metrics", "penstock-worker;health"]
    if isinstance(site.broker, RabbitBroker):
        chosen.append("penstock-functions;http")
    by_name = {"source_labels": [f"{_LABEL}app_kubernetes_io_name", _PORT]}
    return {
        "job_name": site.namespace,
        "scrape_interval": INTERVAL,
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [site.namespace]}}],
        "relabel_configs": [
            by_name | {"regex": "|".join(chosen), "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            {"source_labels": [f"{_LABEL}penstock_dev_model"], "target_label": "worker"},
            *(
                {"target_label": name, "replacement": value}
                for name, value in series_labels(site).items()
            ),
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the overlay. Returns 0, or 2 if an argument or the site file is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.kubernetes.self_hosted", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--site", type=Path, required=True, help="see site.example.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the overlay to")
    parser.add_argument(
        "--models-file", type=Path, default=Path("models.yaml"), help="(default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        site, catalog = read_site(options.site), read_catalog(options.models_file)
        write_self_hosted(options.out, site, catalog, options.models_file)
    except ConfigurationError as error:
        print(f"infra.kubernetes.self_hosted: {error.message}", file=sys.stderr)
        return 2
    print(f"{options.out}: render with: kubectl kustomize {options.out}")
    return 0


def write_self_hosted(out: Path, site: SelfHostedSite, catalog: Catalog, models_file: Path) -> None:
    """Writes the overlay, replacing an existing one.

    Args:
        out: output folder. Files from an earlier run are deleted.

    Raises:
        ConfigurationError: see `write_overlay`.
    """
    with replace_folder(out) as folder:
        write_overlay(folder / "workers", catalog, models_file, worker_deployment(site))
        write_clients(folder / "clients", site, models_file)
        write_network(folder / "network", site)
        resources = ["workers", "clients", "network"]
        if servers := server_patches(site):
            write_parts(
                folder / "servers",
                *(f"{TREE}/{name}" for name in servers),
                namespace=site.namespace,
                images=[
                    image_override("penstock-redis", site.images.redis),
                    image_override("penstock-servers", site.images.servers),
                ],
                patches=[
                    json_patch("StatefulSet|PersistentVolumeClaim", patch, name)
                    for name, patch in servers.items()
                ],
            )
            resources.append("servers")
        if site.ingress is not None:
            write_ingress(folder / "ingress", site.namespace, site.ingress)
            resources.append("ingress")
        if site.autoscaling is not None:
            write_scraping(folder, site)
        if site.time_slicing:
            write_time_slicing(folder, catalog)
        write_kustomization(folder, resources, patches=_patches_of_all(site))


def _patches_of_all(site: SelfHostedSite) -> list[dict[str, Any]]:
    """Returns patches for every pod that computes or serves: object store, Google credentials."""
    added: list[tuple[str, dict[str, Any]]] = []
    added += [("envFrom", source) for source in secret_of_broker(site)]
    if isinstance(site.objects, VolumeObjects):
        claim = {"name": "objects", "persistentVolumeClaim": {"claimName": "objects"}}
        added += [("volumes", claim), ("mount", {"name": "objects", "mountPath": OBJECTS_DIR})]
    elif site.objects.secret is not None:
        added.append(("envFrom", {"secretRef": {"name": site.objects.secret}}))
    if site.google is not None:
        secret = {"name": "google", "secret": {"secretName": site.google.credentials_secret}}
        mount = {"name": "google", "mountPath": CREDENTIALS_DIR, "readOnly": True}
        added += [("volumes", secret), ("mount", mount)]
    places = {
        "volumes": "/spec/template/spec/volumes/-",
        "mount": f"{CONTAINER}/volumeMounts/-",
        "envFrom": f"{CONTAINER}/envFrom/-",
    }
    patch = [add_value(places[place], value) for place, value in added]
    # Every Deployment is a client or a worker. The servers are StatefulSets.
    return [json_patch("Deployment", patch)] if patch else []


if __name__ == "__main__":
    sys.exit(main())
