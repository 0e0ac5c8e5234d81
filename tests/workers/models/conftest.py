"""The two real models of the catalogue, each loaded once."""

from pathlib import Path

import pytest

from shared.catalogue import Catalogue, read_catalogue
from workers.models import model_for, preparer_for
from workers.models.base import Model, Preparer
from workers.sources import resolve


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return read_catalogue(Path("models.yaml"))


@pytest.fixture(scope="session")
def minilm_folder(catalogue: Catalogue) -> Path:
    entry = catalogue.default("embedding")
    return resolve(entry.source, entry.revision, Path("unused"))


@pytest.fixture(scope="session")
def minilm_preparer(catalogue: Catalogue, minilm_folder: Path) -> Preparer:
    return preparer_for(catalogue.default("embedding"), minilm_folder)


@pytest.fixture(scope="session")
def minilm(catalogue: Catalogue, minilm_folder: Path) -> Model:
    model = model_for(catalogue.default("embedding"), minilm_folder, "cpu")
    model.setup()
    model.warmup()
    return model


@pytest.fixture(scope="session")
def tiny_folder(catalogue: Catalogue) -> Path:
    entry = catalogue.default("image")
    return resolve(entry.source, entry.revision, Path("unused"))


@pytest.fixture(scope="session")
def tiny_preparer(catalogue: Catalogue, tiny_folder: Path) -> Preparer:
    return preparer_for(catalogue.default("image"), tiny_folder)


@pytest.fixture(scope="session")
def tiny(catalogue: Catalogue, tiny_folder: Path) -> Model:
    model = model_for(catalogue.default("image"), tiny_folder, "cpu")
    model.setup()
    model.warmup()
    return model
