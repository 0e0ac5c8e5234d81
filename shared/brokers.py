"""The configured broker, either Pub/Sub or RabbitMQ. Only this module knows about both of them.

A process imports only the client it uses, because importing Google's client takes 0.3 s of CPU
time.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from shared.broker.transport import Admin, Transport
from shared.settings import Settings


def transport_of(settings: Settings) -> AbstractAsyncContextManager[Transport]:
    """Returns the transport for these settings, not yet opened."""
    if settings.broker:
        from shared.broker.rabbitmq.client import RabbitTransport

        return RabbitTransport(settings.project, settings.broker)
    from shared.broker.pubsub.client import PubSubTransport

    return PubSubTransport(settings.project, settings.pubsub_endpoint)


def admin_of(settings: Settings, timeout_s: float = 30.0) -> AbstractAsyncContextManager[Admin]:
    """Returns the admin connection for these settings, not yet opened."""
    if settings.broker:
        from shared.broker.rabbitmq.admin import RabbitAdmin

        return RabbitAdmin(settings.project, settings.broker, timeout_s=timeout_s)
    from shared.broker.pubsub.admin import PubSubAdmin

    return PubSubAdmin(settings.project, settings.pubsub_endpoint, timeout_s=timeout_s)
