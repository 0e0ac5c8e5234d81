"""The catalog's two real models and a tiny Stable Diffusion XL, each loaded once."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.models.catalog import Catalog
from shared.models.catalog_file import read_catalog
from tests.workers.models.batches import model_for
from workers.models.base import InferenceModel, Preparer
from workers.models.source import resolve
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess
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


@pytest.fixture(scope="session")
async def process(catalog: Catalog, tiny_folder: Path) -> AsyncIterator[PooledProcess]:
    """A separate process that draws with the shipped image model."""
    hosted = HostedModel(catalog.default("image"), tiny_folder)
    async with ModelPool([hosted], device="cpu", processes=1) as pool:
        yield pool.processes[0]


class TinyPipeline(NamedTuple):
    """A pipeline family's tiny pipeline, on a CPU."""

    folder: Path
    preparer: Preparer
    model: InferenceModel


@pytest.fixture(scope="session")
def tiny_xl_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Imports diffusers, which tests of text models don't need.
    from tests.workers.models.tiny_xl import write_folder

    return write_folder(tmp_path_factory.mktemp("xl"), tiny_folder)


@pytest.fixture(scope="session")
def tiny_xl(catalog: Catalog, tiny_xl_folder: Path) -> TinyPipeline:
    entry = catalog.default("image")
    model = model_for(entry, tiny_xl_folder, "cpu")
    model.setup()
    return TinyPipeline(tiny_xl_folder, preparer_for(entry, tiny_xl_folder), model)


@pytest.fixture(scope="session", params=["sd", "sdxl"])
def family(request: pytest.FixtureRequest) -> TinyPipeline:
    """Each pipeline family that lets images join a running batch."""
    if request.param == "sd":
        return TinyPipeline(
            *(request.getfixturevalue(name) for name in ("tiny_folder", "tiny_preparer", "tiny"))
        )
    tiny_xl: TinyPipeline = request.getfixturevalue("tiny_xl")
    return tiny_xl
