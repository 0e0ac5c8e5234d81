"""`python -m infra.kubernetes.self_hosted`: the overlay of a whole deployment off Google.

Workers are those of every other cluster (overlay.py). Around them come the API, the runner of
batches, the functions, and the servers that the site does not take from elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.deployment import Deployment
from infra.kubernetes.kustomization import (
    deployment_patch,
    image_override,
    path_up_to,
    write_kustomization,
)
from infra.kubernetes.overlay import clear_overlay, write_overlay
from infra.kubernetes.site import (
    BucketObjects,
    EmbeddedBroker,
    EmbeddedRows,
    GivenRedis,
    GoogleBroker,
    RabbitBroker,
    SelfHostedSite,
    VolumeObjects,
    read_site,
)
from infra.kubernetes.site_parts import (
    CONTAINER,
    TREE,
    objects_claim,
    server_patches,
    write_ingress,
    write_network,
    write_server,
)
from shared.catalog import Catalog, read_catalog
from shared.errors import ConfigurationError

OBJECTS_DIR = "/var/lib/penstock/objects"
CREDENTIALS_DIR = "/etc/penstock-google"
KEYS_URL = "file:///etc/penstock-keys/keys.json"
NO_NETWORK = ("127.0.0.1/32",)
"""The addresses of a Redis in the cluster. Its pods are let through by their label instead."""
CLIENTS = ("api", "batches", "functions", "row-archive")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the overlay. Returns 0, or 2 if an argument or the site file is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.kubernetes.self_hosted", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--site", type=Path, required=True, help="see site.example.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the overlay")
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
    """Writes the overlay, and replaces an existing one.

    Args:
        out: the folder. Files of an earlier run are deleted.
        site: what runs there, and with what.
        catalog: the models to serve.
        models_file: where it was read.

    Raises:
        ConfigurationError: as `write_overlay`.
    """
    clear_overlay(out)
    write_overlay(out / "workers", catalog, models_file, worker_deployment(site))
    _write_clients(out / "clients", _clients(site), site, models_file)
    servers = server_patches(site)
    for name, patch in servers.items():
        write_server(out / name, name, site, patch)
    write_network(out / "network", site)
    folders = ["workers", "clients", *servers, "network"]
    if site.ingress is not None:
        write_ingress(out / "ingress", site.namespace, site.ingress)
        folders.append("ingress")
    if isinstance(site.objects, VolumeObjects):
        claim = objects_claim(site.namespace, site.objects)
        (out / "objects.yaml").write_text(yaml.safe_dump(claim), encoding="utf-8")
        folders.append("objects.yaml")
    write_kustomization(out, folders, patches=_patches_of_all(site))


def _clients(site: SelfHostedSite) -> list[str]:
    """Those of CLIENTS that run there."""
    has = {
        "batches": site.batches,
        # Google's broker pushes to the functions that Terraform makes.
        "functions": not isinstance(site.broker, GoogleBroker),
        "row-archive": _has_archive(site),
    }
    return [name for name in CLIENTS if has.get(name, True)]


def _has_archive(site: SelfHostedSite) -> bool:
    return isinstance(site.rows, EmbeddedRows) and site.rows.archive


def worker_deployment(site: SelfHostedSite) -> Deployment:
    """What workers there are given."""
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
        settings=_endpoints(site),
    )


def _objects_url(site: SelfHostedSite) -> str:
    return site.objects.url if isinstance(site.objects, BucketObjects) else f"file://{OBJECTS_DIR}"


def _endpoints(site: SelfHostedSite) -> dict[str, str]:
    """Where the servers are that are not Google's, and how to reach what is."""
    found = {}
    if isinstance(site.broker, EmbeddedBroker):
        found["PENSTOCK_PUBSUB_ENDPOINT"] = "pubsub:8085"
    if isinstance(site.rows, EmbeddedRows):
        found["PENSTOCK_BIGQUERY_ENDPOINT"] = "http://bigquery:9050"
    if _has_archive(site):
        found["PENSTOCK_ROWS_URL"] = f"{_objects_url(site)}/usage"
    if site.google is not None:
        found["GOOGLE_APPLICATION_CREDENTIALS"] = f"{CREDENTIALS_DIR}/credentials.json"
        found["GOOGLE_CLOUD_PROJECT"] = site.google.project
    return found


def client_settings(site: SelfHostedSite) -> dict[str, str]:
    """The environment of API, runner of batches and functions. Their images have the rest."""
    workers = worker_deployment(site)
    settings = {
        "PENSTOCK_DATASET": workers.dataset,
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


def _write_clients(
    folder: Path, names: Sequence[str], site: SelfHostedSite, models_file: Path
) -> None:
    """What uses the servers, besides the workers: all of it with the same settings."""
    folder.mkdir()
    (folder / "models.yaml").write_bytes(models_file.read_bytes())
    settings = [f"{key}={value}" for key, value in sorted(client_settings(site).items())]
    images = {
        "penstock-api": site.images.api,
        "penstock-functions": site.images.functions,
        "penstock-servers": site.images.servers,
    }
    write_kustomization(
        folder,
        [path_up_to(folder, f"{TREE}/{name}") for name in names],
        namespace=site.namespace,
        images=[image_override(image, given) for image, given in images.items()],
        configMapGenerator=[
            {"name": "models", "files": ["models.yaml"]},
            {"name": "settings", "literals": settings},
        ],
        patches=[_client_patch(name, site) for name in names],
    )


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
        if isinstance(site.broker, RabbitBroker):
            container |= _taking_functions(container["env"])
    else:
        pod["volumes"] = [{"name": "keys", "secret": {"secretName": site.keys_secret}}]
    if name != "api":
        return deployment_patch(name, pod)
    container["resources"] = {
        "requests": {"cpu": site.api.cpu, "memory": site.api.memory},
        "limits": {"memory": site.api.memory},
    }
    if site.has_servers:
        pod["initContainers"] = [_provisioning(site)]
    return deployment_patch(name, pod, replicas=site.api.replicas)


def _taking_functions(variables: list[dict[str, str]]) -> dict[str, Any]:
    """What is different where functions take messages: RabbitMQ pushes to nobody."""
    return {
        "command": ["python", "-m", "workers.functions"],
        "args": [],
        "env": [
            *variables,
            {"name": "PENSTOCK_HEALTH_HOST", "value": "0.0.0.0"},
            {"name": "PENSTOCK_HEALTH_PORT", "value": "8080"},
        ],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}},
        # Alive, not connected: a restart would not bring the broker back.
        "livenessProbe": {"httpGet": {"path": "/metrics", "port": "http"}},
    }


def _provisioning(site: SelfHostedSite) -> dict[str, Any]:
    """A container that makes topics, subscriptions and tables before the API starts."""
    pushed = isinstance(site.broker, EmbeddedBroker)
    return {
        "name": "provision",
        "image": "penstock-servers",
        "imagePullPolicy": "IfNotPresent",
        "args": ["provision", *(["--functions-url", "http://functions"] if pushed else [])],
        "envFrom": [{"configMapRef": {"name": "settings"}}, *_secret_of_broker(site)],
        "resources": {
            "requests": {"cpu": "100m", "memory": "512Mi", "ephemeral-storage": "64Mi"},
            "limits": {"memory": "512Mi", "ephemeral-storage": "128Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": "/etc/penstock", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _secret_of_broker(site: SelfHostedSite) -> list[dict[str, Any]]:
    if not isinstance(site.broker, RabbitBroker):
        return []
    return [{"secretRef": {"name": site.broker.secret}}]


def _patches_of_all(site: SelfHostedSite) -> list[dict[str, Any]]:
    """What every pod gets that computes or answers: the object store, and Google's credentials."""
    added: list[tuple[str, dict[str, Any]]] = []
    added += [("envFrom", one) for one in _secret_of_broker(site)]
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
    patch = [{"op": "add", "path": places[place], "value": value} for place, value in added]
    # Every Deployment is one of these. The servers are StatefulSets.
    return [{"target": {"kind": "Deployment"}, "patch": yaml.safe_dump(patch)}] if patch else []


if __name__ == "__main__":
    sys.exit(main())
