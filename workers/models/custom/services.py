"""The ports of our own services, to which a class's process may not connect."""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.settings import Settings

METADATA_PORT = 80
"""Of the metadata server of Google Cloud, which gives out tokens of the worker's account
(https://cloud.google.com/compute/docs/metadata/overview)."""
REDIS_PORT, RABBITMQ_PORT, HTTPS_PORT = 6379, 5672, 443


def service_ports(settings: Settings) -> list[int]:
    """The TCP ports of Redis, broker and BigQuery, and on Google Cloud of the metadata server."""
    ports = {
        urlsplit(url).port or usual
        for url, usual in (
            (settings.redis_url, REDIS_PORT),
            (settings.records_url, REDIS_PORT),
            (settings.broker, RABBITMQ_PORT),
            (settings.bigquery_endpoint, HTTPS_PORT),
        )
        if url and not url.startswith("unix:")
    }
    if settings.pubsub_endpoint and not settings.pubsub_endpoint.startswith("unix:"):
        ports.add(urlsplit(f"//{settings.pubsub_endpoint}").port or HTTPS_PORT)
    if not settings.pubsub_endpoint and not settings.broker:
        ports.add(METADATA_PORT)
    return sorted(ports - {HTTPS_PORT})
