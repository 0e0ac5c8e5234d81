"""`python -m tests.cog_comparison`: reads Cog's test scripts, and finds differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cog_comparison.__main__ import main
from tests.cog_comparison.fixtures import read_fixtures, split_txtar

SCRIPT = r"""
# A class with inputs of several types.
cog build -t $TEST_IMAGE
cog predict $TEST_IMAGE -i text=12 -i number=3 -i files=@a.txt -i files=@b.txt
curl POST /predictions '{"input": {"text": "a", "file": "data:text/plain;base64,YWJj"}}'
! curl POST /predictions '{"input": {"number": "x"}}'

-- cog.yaml --
build:
  python_version: "3.12"
predict: "predict.py:Predictor"
environment: ["FLAVOR=vanilla"]

-- predict.py --
from cog import BasePredictor, Input, Path

class Predictor(BasePredictor):
    def predict(
        self, text: str, number: int = 1, file: Path = None, files: list[Path] = None
    ) -> str:
        return text
-- a.txt --
first
"""


def test_inputs_of_a_script_are_read_by_the_types_of_the_class(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "typed.txtar").write_text(SCRIPT)
    (fixture,) = read_fixtures(scripts, tmp_path / "work")
    assert (fixture.origin, fixture.reference) == ("script", "predict.py:Predictor")
    assert fixture.environment == {"FLAVOR": "vanilla"}
    by_command, by_body, refused = fixture.requests
    assert by_command.values == {"text": "12", "number": 3, "files": [None, None]}
    assert [file.name for file in by_command.files] == ["a.txt", "b.txt"]
    assert by_command.files[0].data == b"first\n"
    assert (by_body.values["file"], by_body.files[0].data) == (None, b"abc")
    assert refused.must_fail
    assert not by_body.must_fail


def test_inputs_are_made_up_if_no_command_names_them(tmp_path: Path) -> None:
    script, files = split_txtar(SCRIPT)
    project = tmp_path / "project"
    project.mkdir()
    for name, text in files.items():
        (project / name).write_text(text)
    (fixture,) = read_fixtures(tmp_path, tmp_path / "work")
    assert script.startswith("\n# A class")
    assert (fixture.name, fixture.origin) == ("project", "signature")
    assert fixture.requests[0].values == {"text": "hello"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("build: {gpu: true}\npredict: 'predict.py:Predictor'", "needs a GPU image"),
        ("build: {python_packages: [torch==2.7]}\npredict: 'predict.py:P'", "installs torch"),
        ("build: {}", "cog.yaml names no class: a test of Cog's command"),
    ],
)
def test_fixtures_that_cannot_run_here_have_a_reason(
    tmp_path: Path, settings: str, reason: str
) -> None:
    (tmp_path / "cog.yaml").write_text(settings)
    (fixture,) = read_fixtures(tmp_path, tmp_path / "work")
    assert fixture.skipped == reason


@pytest.mark.slow
def test_a_class_is_compared_with_cogs_own_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = """
curl POST /predictions '{"input": {"text": "a"}}'
-- cog.yaml --
predict: "predict.py:Predictor"
-- predict.py --
from cog import BasePredictor

class Predictor(BasePredictor):
    def predict(self, text: str) -> str:
        print("printed", text)
        return text * 2
"""
    (tmp_path / "same.txtar").write_text(same)
    assert main([str(tmp_path)]) == 0
    assert "1 fixtures: 1 right" in capsys.readouterr().out
    # The fixture expects Cog to reject this input, but nothing rejects it.
    (tmp_path / "other.txtar").write_text(same.replace("\ncurl", "\n! curl"))
    assert main([str(tmp_path)]) == 1
    assert "its test says that it fails / succeeded" in capsys.readouterr().out
