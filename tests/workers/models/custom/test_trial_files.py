"""`penstock predict` shows what a class gives, and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workers.models.custom.classes import write_class
from workers.models.custom.trial import predict

FILES = """
class Predictor(BasePredictor):
    def predict(self, sizes: list[int]) -> {output}:
        made = []
        for number, size in enumerate(sizes):
            path = Path(os.environ["TMPDIR"]) / f"{{number}}.txt"
            path.write_text(str(number) * size)
            {each}
        {end}
"""


def test_files_of_a_stream_are_written_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = FILES.format(output="Iterator[Path]", each="yield path", end="pass")
    (tmp_path / "class").mkdir()
    predict(write_class(tmp_path / "class", body), ["sizes=[2, 3]"], tmp_path)
    paths = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    assert paths == [str(tmp_path / "output.txt"), str(tmp_path / "output-1.txt")]
    assert [Path(path).read_text() for path in paths] == ["00", "111"]


def test_files_of_a_list_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = FILES.format(output="List[Path]", each="made.append(path)", end="return made")
    (tmp_path / "class").mkdir()
    predict(write_class(tmp_path / "class", body), ["sizes=[2, 3]"], tmp_path)
    paths = json.loads(capsys.readouterr().out)
    assert [Path(path).read_text() for path in paths] == ["00", "111"]
