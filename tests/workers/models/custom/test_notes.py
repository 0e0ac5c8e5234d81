"""Notes for the author about settings and methods that have no effect here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.penstock_command import penstock
from tests.workers.models.custom.classes import compute, entry_of, output_of, write_class
from tests.workers.models.custom.started import StartedClass
from workers.models.custom.checking import inspect_folder
from workers.models.custom.sources import source_files

OWN_METHODS = """
class Predictor(BasePredictor):
    is_close = staticmethod(isinstance)

    def predict(self, text: str) -> str:
        return self.work(self.predict_batch([text]), len)

    def predict_batch(self, texts: list[str], size: int = 8) -> list[str]:
        return [text[:size] for text in texts]

    def work(self, texts: list[str], count) -> str:
        return f"{texts[0]} {count(texts)}"

    def healthcheck(self) -> bool:
        raise RuntimeError("never called")
"""


def test_methods_of_the_author_are_left_alone(tmp_path: Path) -> None:
    folder = write_class(tmp_path, OWN_METHODS)
    inspected = inspect_folder(folder)
    interface = inspected.interface
    assert (interface.batches, interface.weighs, interface.compares) == (False, False, False)
    uncalled = [note for note in inspected.notes if "is not called" in note]
    begins = [re.split("[:]| because", note)[0] for note in uncalled]
    assert begins == [
        "predict_batch is not called",
        "healthcheck is not called",
        "work is not called",
        "is_close is not called",
    ]
    with StartedClass(entry_of(folder), folder) as model:
        assert output_of(compute(model, {"text": "several words"})) == "several  1"


@pytest.mark.parametrize("hint", ["list[os.nope]", "list[", "list[Nobody]"])
def test_batches_whose_annotations_are_broken_are_not_called(tmp_path: Path, hint: str) -> None:
    code = f"""
import os

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        return text

    def predict_batch(self, inputs: "{hint}") -> list[str]:
        return []
"""
    inspected = inspect_folder(write_class(tmp_path, code))
    assert not inspected.interface.batches
    (note,) = inspected.notes
    assert note.startswith("predict_batch is not called: predict_batch: its annotations can't be")


COG_YAML = """
build:
  system_packages: [ffmpeg]
  run: [echo]
  python_version: "3.99"
"""
NOTES = (
    "note: cog.yaml: build.system_packages has no effect here\n",
    "note: cog.yaml: build.run has no effect here\n",
    "note: cog.yaml: build.python_version 3.99 has no effect here",
)


@pytest.mark.parametrize("words", [["models", "check"], ["predict", "-i", "a=1"]])
def test_notes_about_cog_yaml_come_before_the_class_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    folder = write_class(tmp_path, "import missing_package_of_the_system", COG_YAML)
    assert penstock(*words, str(folder)) == 1
    said = capsys.readouterr().err
    for note in NOTES:
        assert said.count(note) == 1
        assert said.index(note) < said.index("No module named 'missing_package_of_the_system'")


def test_notes_come_once_if_the_class_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_class(tmp_path, OWN_METHODS, COG_YAML)
    assert penstock("predict", str(folder), "-i", "text=a", "-o", str(tmp_path)) == 0
    said = capsys.readouterr()
    assert said.out == '"a 1"\n'
    assert [said.err.count(note) for note in (*NOTES, "note: work is not called")] == [1, 1, 1, 1]


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta/history"])
def test_environments_in_the_folder_are_no_sources(tmp_path: Path, mark: str) -> None:
    folder = write_class(tmp_path, OWN_METHODS)
    (folder / "env" / "lib" / "conda-meta").mkdir(parents=True)
    (folder / "env" / "conda-meta").mkdir()
    (folder / "env" / mark).touch()
    for number in range(2100):
        (folder / "env" / "lib" / f"{number}.py").touch()
    (folder / "helpers").mkdir()
    (folder / "helpers" / "own.py").touch()
    assert source_files(folder) == [folder / "helpers" / "own.py", folder / "predict.py"]
