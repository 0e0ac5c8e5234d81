"""Fixtures for tests of the local stack."""

from pathlib import Path

import pytest


@pytest.fixture
def kept_choices(artifacts_dir: Path) -> dict[str, str]:
    """Settings that make a worker use the backend chosen by an earlier worker."""
    return {"PENSTOCK_ARTIFACTS_DIR": str(artifacts_dir)}


@pytest.fixture
def servers(
    kept_choices: dict[str, str], redis_url: str, pubsub_endpoint: str, bigquery_endpoint: str
) -> dict[str, str]:
    """The same variables, plus others that replace the stack's own servers with ones already
    running.
    """
    return kept_choices | {
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_PUBSUB_ENDPOINT": pubsub_endpoint,
        "PENSTOCK_BIGQUERY_ENDPOINT": bigquery_endpoint,
    }
