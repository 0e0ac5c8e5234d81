"""What uses the servers of a site besides its workers: API, batches, functions, row archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.kubernetes.kustomization import (
    deployment_patch,
    image_override,
    path_up_to,
    write_kustomization,
)
from infra.kubernetes.site import EmbeddedBroker, GoogleBroker, RabbitBroker, SelfHostedSite
from infra.kubernetes.site_parts import TREE
from infra.kubernetes.site_settings import client_settings, has_archive, secret_of_broker

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
    """Those of CLIENTS that run there."""
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
