"""The command on a small model, and the artifact it creates."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.penstock_command import penstock
from tests.workers.optimize.tiny_bert import ENTRY, Optimize, make_tiny_bert
from workers.models.artifact import Artifact, read_artifact


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-bert")
    make_tiny_bert(folder)
    return folder


@pytest.fixture
def optimize(tiny_bert: Path, tmp_path: Path) -> Optimize:
    """Runs the command on the `tiny` model; artifacts are written to tmp_path/artifacts."""

    def run(*words: str, tolerance: float = 0.9999) -> int:
        catalog = tmp_path / "models.yaml"
        catalog.write_text(ENTRY.format(folder=tiny_bert, tolerance=tolerance))
        paths = ["--models-file", str(catalog), "--artifacts-dir", str(tmp_path / "artifacts")]
        return penstock("optimize", "tiny", *paths, *words)

    return run


@pytest.fixture
def made(tmp_path: Path) -> Callable[[], Artifact]:
    """The artifact that the command created."""

    def read() -> Artifact:
        (folder,) = (tmp_path / "artifacts" / "tiny").iterdir()
        return read_artifact(folder)

    return read
