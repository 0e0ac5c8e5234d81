"""Our files in a class's folder, next to the author's own files."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import yaml

from infra.local.interfaces import refresh_interfaces
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.models.interface import INTERFACE_FILE
from shared.models.measurement import MEASUREMENT_FILE, read_measurement
from tests.penstock_command import penstock
from tests.workers.models.custom.classes import entry_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.custom.checking import inspect_folder

BODY = """
class Predictor(BasePredictor):
    def predict(self, a: int) -> str:
        return open("schema.json").read()
"""
AUTHORS = '{"type": "object", "properties": {"name": {"type": "string"}}}'


OPTIONAL = """
class Predictor(BasePredictor):
    def predict(self, a: int = Input(default=None), b: int = 1) -> str:
        return repr((a, b))
"""


def write_catalog(folder: Path) -> Path:
    """Writes a catalog with a folder's class."""
    path = folder.parent / "models.yaml"
    entry = {"name": "mine", "task": "custom", "source": f"local:{folder}"}
    path.write_text(yaml.safe_dump({"models": [entry]}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "class").mkdir()
    return write_class(tmp_path / "class", BODY)


def test_an_authors_files_stay_as_they_are(folder: Path) -> None:
    for name in ("schema.json", "measured.json"):
        (folder / name).write_text(AUTHORS)
    assert penstock("models", "check", str(folder)) == 0
    assert penstock("models", "measure", str(folder), "-i", "a=1", "--repeats", "1", "--cpu") == 0
    for name in ("schema.json", "measured.json"):
        assert (folder / name).read_text() == AUTHORS
    (model,) = read_catalog(write_catalog(folder)).models
    assert model.interface is not None
    assert list(model.interface.properties) == ["a"]
    assert read_measurement(MEASUREMENT_FILE.find(folder)).batches[1] > 0


@pytest.mark.parametrize("file", [INTERFACE_FILE, MEASUREMENT_FILE])
@pytest.mark.parametrize("text", [AUTHORS, "", "no JSON", "[1]"])
def test_a_file_that_we_did_not_write_is_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str], file: object, text: str
) -> None:
    assert isinstance(file, type(INTERFACE_FILE))
    (folder / file.name).write_text(text)
    with pytest.raises(ConfigurationError, match="was not written by Penstock"):
        file.write(folder, "{}")
    assert (folder / file.name).read_text() == text


def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConfigurationError, match="File too large"):
            INTERFACE_FILE.write(folder, " " * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(folder.iterdir()) == before


def test_a_folder_that_an_earlier_release_checked_still_loads(folder: Path) -> None:
    assert penstock("models", "check", str(folder)) == 0
    INTERFACE_FILE.find(folder).rename(folder / "schema.json")
    catalog = write_catalog(folder)
    (model,) = read_catalog(catalog).models
    assert model.interface is not None
    refresh_interfaces(catalog, print)
    assert not (folder / INTERFACE_FILE.name).exists(), "it is current under its old name"
    (folder / "helper.py").write_text("")
    refresh_interfaces(catalog, print)
    old = json.loads((folder / "schema.json").read_text())
    (model,) = read_catalog(catalog).models
    assert model.interface is not None
    assert model.interface.sources_sha256 != old["sources_sha256"], "the new file comes first"


def test_an_authors_schema_is_not_taken_for_an_interface(folder: Path) -> None:
    (folder / "schema.json").write_text(AUTHORS)
    with pytest.raises(ConfigurationError, match=r"penstock\.schema\.json: No such file"):
        read_catalog(write_catalog(folder))


@pytest.mark.parametrize("required", [["a"], [], ["a", "b"]])
def test_a_file_may_require_inputs_that_the_code_does_not(
    folder: Path, required: list[str]
) -> None:
    """Release 0.1.0 did not accept None as the default for a type that is not optional."""
    write_class(folder, OPTIONAL)
    inspected = inspect_folder(folder).interface
    assert inspected.inputs["required"] == []
    older = {**inspected.inputs, "required": required}
    entry = entry_of(folder, interface=inspected.model_copy(update={"inputs": older}))
    StartedClass(entry, folder).close()


def test_a_file_must_require_what_the_code_does(folder: Path) -> None:
    inspected = inspect_folder(folder).interface
    older = {**inspected.inputs, "required": []}
    entry = entry_of(folder, interface=inspected.model_copy(update={"inputs": older}))
    with pytest.raises(ConfigurationError, match="a is required in the code but missing"):
        StartedClass(entry, folder)
