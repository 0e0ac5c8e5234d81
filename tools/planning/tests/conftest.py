"""Skips the other tier's files, and provides fixtures from tests/conftest.py."""

from pathlib import Path

import pytest

from tests.conftest import _no_settings_from_outside, anyio_backend, bigquery_endpoint
from tests.tiers import has_none_of

__all__ = ["_no_settings_from_outside", "anyio_backend", "bigquery_endpoint"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Returns True if this tier does not need to import a file or folder."""
    return has_none_of(config.option.markexpr, collection_path) or None
