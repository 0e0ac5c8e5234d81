"""True if this machine has a RabbitMQ server, which no wheel carries."""

import pytest

from infra.local.stack_processes import find_rabbitmq_server
from shared.errors import ConfigurationError


def needs_rabbitmq() -> None:
    """Skips the test where there is none."""
    try:
        find_rabbitmq_server()
    except ConfigurationError as error:
        pytest.skip(error.message)
