"""Settings of a site's processes: addresses, and the secrets that they read."""

from __future__ import annotations

from typing import Any

from infra.kubernetes.deployment import Deployment, OwnPrometheus
from infra.kubernetes.site import (
    BucketObjects,
    EmbeddedBroker,
    EmbeddedRows,
    GivenRedis,
    GoogleBroker,
    RabbitBroker,
    SelfHostedSite,
)

OBJECTS_DIR = "/var/lib/penstock/objects"
CREDENTIALS_DIR = "/etc/penstock-google"
KEYS_URL = "file:///etc/penstock-keys/keys.json"
NO_NETWORK = ("127.0.0.1/32",)
"""The addresses of a Redis in the cluster. Its pods are let through by their label instead."""


def has_archive(site: SelfHostedSite) -> bool:
    """True if a row archive runs there."""
    return isinstance(site.rows, EmbeddedRows) and site.rows.archive


def worker_deployment(site: SelfHostedSite) -> Deployment:
    """The settings of workers there."""
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
    """The labels that select the series of a site in its Prometheus."""
    given = site.autoscaling.labels if site.autoscaling is not None else None
    return {"namespace": site.namespace} if given is None else given


def _objects_url(site: SelfHostedSite) -> str:
    return site.objects.url if isinstance(site.objects, BucketObjects) else f"file://{OBJECTS_DIR}"


def _endpoints(site: SelfHostedSite) -> dict[str, str]:
    """The addresses of servers that are not Google's, and the access to those that are."""
    found = {}
    if isinstance(site.broker, EmbeddedBroker):
        found["PENSTOCK_PUBSUB_ENDPOINT"] = "pubsub:8085"
    if isinstance(site.rows, EmbeddedRows):
        found["PENSTOCK_BIGQUERY_ENDPOINT"] = "http://bigquery:9050"
    if has_archive(site):
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


def secret_of_broker(site: SelfHostedSite) -> list[dict[str, Any]]:
    """The source of the variable that names a RabbitMQ. Empty: the broker is another one."""
    if not isinstance(site.broker, RabbitBroker):
        return []
    return [{"secretRef": {"name": site.broker.secret}}]
