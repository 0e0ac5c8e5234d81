"""The ports of Penstock's services, to which a class's process may not connect."""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.process.loopback import is_loopback
from shared.settings import Settings

METADATA_PORT = 80
"""Port of a cloud's metadata server, which issues tokens for the worker's account to any caller
(https://cloud.google.com/compute/docs/metadata/overview).

Other clouds use the same port.
"""
REDIS_PORT, RABBITMQ_PORT, HTTPS_PORT = 6379, 5672, 443


def service_ports(settings: Settings) -> list[int]:
    """Returns the TCP ports of Redis, the broker, BigQuery, and the cloud's metadata server.

    The last one is omitted if the broker is on this machine, as with `penstock up`.
    """
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
    if not _has_local_broker(settings):
        ports.add(METADATA_PORT)
    return sorted(ports - {HTTPS_PORT})


def _has_local_broker(settings: Settings) -> bool:
    if settings.broker:
        return is_loopback(urlsplit(settings.broker).hostname or "")
    endpoint = settings.pubsub_endpoint
    return endpoint.startswith("unix:") or (
        bool(endpoint) and is_loopback(urlsplit(f"//{endpoint}").hostname or "")
    )
