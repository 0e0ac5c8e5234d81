"""Skips the other tier's files, as tests/conftest.py does for its folder."""

from pathlib import Path

import pytest

from tests.tiers import has_none_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Returns True if this tier doesn't need to import a file or folder."""
    return has_none_of(config.option.markexpr, collection_path) or None
