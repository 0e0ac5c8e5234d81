"""True if this machine has a RabbitMQ server, which no wheel includes."""

import pytest

from infra.local.stack_processes import find_rabbitmq_server
from shared.errors import ConfigurationError


def needs_rabbitmq() -> None:
    """Skips the test if it is not installed."""
    try:
        find_rabbitmq_server()
    except ConfigurationError as error:
        pytest.skip(error.message)
