"""What tests of the local stack share."""

import pytest


@pytest.fixture
def servers(redis_url: str, pubsub_endpoint: str, bigquery_endpoint: str) -> dict[str, str]:
    """Settings that put running servers in the place of the stack's own."""
    return {
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
    }
