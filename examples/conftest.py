"""Leaves files of the other tier out, as tests/conftest.py does for its folder."""

from pathlib import Path

import pytest

from tests.tiers import has_none_of


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """True if a file or folder needn't be imported for this tier."""
    return has_none_of(config.option.markexpr, collection_path) or None
