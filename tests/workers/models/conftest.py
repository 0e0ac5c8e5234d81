"""The two real models of the catalog, each loaded once."""

from pathlib import Path

import pytest

from shared.catalog import Catalog, read_catalog
from tests.workers.models.batches import model_for
from workers.models.base import InferenceModel, Preparer
from workers.models.source import resolve
from workers.tasks import preparer_for


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return read_catalog(Path("models.yaml"))


@pytest.fixture(scope="session")
def minilm_folder(catalog: Catalog) -> Path:
    entry = catalog.default("embedding")
    return resolve(entry.source, entry.revision, Path("unused"))


@pytest.fixture(scope="session")
def minilm_preparer(catalog: Catalog, minilm_folder: Path) -> Preparer:
    return preparer_for(catalog.default("embedding"), minilm_folder)


@pytest.fixture(scope="session")
def minilm(catalog: Catalog, minilm_folder: Path) -> InferenceModel:
    model = model_for(catalog.default("embedding"), minilm_folder, "cpu")
    model.setup()
    model.warmup()
    return model


@pytest.fixture(scope="session")
def tiny_folder(catalog: Catalog) -> Path:
    entry = catalog.default("image")
    return resolve(entry.source, entry.revision, Path("unused"))


@pytest.fixture(scope="session")
def tiny_preparer(catalog: Catalog, tiny_folder: Path) -> Preparer:
    return preparer_for(catalog.default("image"), tiny_folder)


@pytest.fixture(scope="session")
def tiny(catalog: Catalog, tiny_folder: Path) -> InferenceModel:
    model = model_for(catalog.default("image"), tiny_folder, "cpu")
    model.setup()
    model.warmup()
    return model
