"""Parses the RabbitMQ broker setting without importing the client. Every process does this."""

from __future__ import annotations

from urllib.parse import urlsplit

from yarl import URL

from shared.errors import ConfigurationError

SCHEMES = {"rabbitmq": "amqp", "rabbitmqs": "amqps", "amqp": "amqp", "amqps": "amqps"}


def broker_url(broker: str) -> URL:
    """Returns the AMQP URL for a broker setting.

    Args:
        broker: `rabbitmq://USER:PASSWORD@HOST:PORT/VHOST`, or `rabbitmqs://` for TLS. `amqp://` and
            `amqps://` are also accepted.

    Raises:
        ConfigurationError: the setting is not a valid URL of this form.
    """
    try:
        parts = urlsplit(broker)
        scheme, _ = SCHEMES[parts.scheme], parts.port
        url = URL(broker)
    except (KeyError, ValueError):
        raise ConfigurationError(
            "the broker URL must look like rabbitmq://USER:PASSWORD@HOST:PORT/VHOST", field="broker"
        ) from None
    if not parts.hostname:
        raise ConfigurationError("the broker URL must have a host", field="broker")
    return url.with_scheme(scheme)
