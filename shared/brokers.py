"""The broker that the settings name: Pub/Sub, or RabbitMQ. The only place that knows both.

A process imports the client of its own broker only: Google's takes a third of a second of CPU time.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from shared.settings import Settings
from shared.transport import Admin, Transport


def transport_of(settings: Settings) -> AbstractAsyncContextManager[Transport]:
    """The transport of these settings, not opened. Enter it to open it."""
    if settings.broker:
        from shared.rabbitmq.client import RabbitTransport

        return RabbitTransport(settings.project, settings.broker)
    from shared.pubsub.client import PubSubTransport

    return PubSubTransport(settings.project, settings.pubsub_endpoint)


def admin_of(settings: Settings, timeout_s: float = 30.0) -> AbstractAsyncContextManager[Admin]:
    """The admin connection of these settings, not opened. Enter it to open it.

    Args:
        timeout_s: limit of each call, retries included.
    """
    if settings.broker:
        from shared.rabbitmq.admin import RabbitAdmin

        return RabbitAdmin(settings.project, settings.broker, timeout_s=timeout_s)
    from shared.pubsub.admin import PubSubAdmin

    return PubSubAdmin(settings.project, settings.pubsub_endpoint, timeout_s=timeout_s)
