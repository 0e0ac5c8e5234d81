"""`python -m infra.kubernetes.self_hosted`: the overlay of a whole deployment off Google.

Workers are those of every other cluster (overlay.py). Around them are the API, the batch runner,
the functions, the row archive, the servers that the site does not bring itself, and the scrape
configuration that lets the autoscaler's queries find our metrics in the site's Prometheus.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.kubernetes.kustomization import (
    deployment_patch,
    image_override,
    path_up_to,
    write_kustomization,
)
from infra.kubernetes.overlay import clear_overlay, write_overlay
from infra.kubernetes.site import (
    EmbeddedBroker,
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
from infra.kubernetes.site_settings import (
    CREDENTIALS_DIR,
    OBJECTS_DIR,
    client_settings,
    has_archive,
    secret_of_broker,
    series_labels,
    worker_deployment,
)
from shared.catalog import Catalog, read_catalog
from shared.errors import ConfigurationError

CLIENTS = ("api", "batches", "functions", "row-archive")


def write_clients(folder: Path, site: SelfHostedSite, models_file: Path) -> None:
    """Writes the folder of those that run there: all of them with the same settings."""
    names = _running(site)
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


def _running(site: SelfHostedSite) -> list[str]:
    """Returns those of CLIENTS that run there."""
    has = {
        "batches": site.batches,
        # Google's broker pushes to the functions that Terraform makes.
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
    """Returns the changes for functions that pull messages, as RabbitMQ does not push."""
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
        "envFrom": [{"configMapRef": {"name": "settings"}}, *secret_of_broker(site)],
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


SCRAPE_FILE = "scrape.yaml"
INTERVAL = "10s"
"""Scrape interval, that of Managed Prometheus. The queries look at a minute of samples."""
_LABEL = "__meta_kubernetes_pod_label_"
_PORT = "__meta_kubernetes_pod_container_port_name"


def write_scraping(folder: Path, site: SelfHostedSite) -> None:
    """Writes the configuration into the folder of an overlay, which does not apply it."""
    text = yaml.safe_dump({"scrape_configs": [_job(site)]}, sort_keys=False)
    (folder / SCRAPE_FILE).write_text(text, encoding="utf-8")


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
        site: the site's services and settings.
        catalog: the models to serve.
        models_file: the file that it was read from.

    Raises:
        ConfigurationError: as `write_overlay`.
    """
    clear_overlay(out)
    write_overlay(out / "workers", catalog, models_file, worker_deployment(site))
    write_clients(out / "clients", site, models_file)
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
    if site.autoscaling is not None:
        write_scraping(out, site)
    write_kustomization(out, folders, patches=_patches_of_all(site))


def _patches_of_all(site: SelfHostedSite) -> list[dict[str, Any]]:
    """The settings of every pod that computes or answers: object store and Google's credentials."""
    added: list[tuple[str, dict[str, Any]]] = []
    added += [("envFrom", one) for one in secret_of_broker(site)]
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
