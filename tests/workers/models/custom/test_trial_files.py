"""`penstock predict` prints a class's output and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.penstock_command import penstock
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


@pytest.mark.parametrize(
    ("output", "end", "written"),
    [
        ("List[Path]", "return made", {"out.txt": "00", "out-1.txt": "111"}),
        ("str", "return made[1].read_text()", {"out.txt": "111"}),
        ("dict", 'return {"a": 1}', {"out.txt": '{"a": 1}\n'}),
    ],
)
def test_an_output_is_written_to_the_file_that_is_named(
    tmp_path: Path, output: str, end: str, written: dict[str, str]
) -> None:
    (tmp_path / "class").mkdir()
    folder = write_class(
        tmp_path / "class", FILES.format(output=output, each="made.append(path)", end=end)
    )
    assert penstock("predict", str(folder), "-i", "sizes=[2, 3]", "-o", f"{tmp_path}/out.txt") == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("out*")} == written


def test_a_streamed_text_is_written_to_the_file_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    body = FILES.format(output="ConcatenateIterator[str]", each="yield str(number)", end="pass")
    folder = write_class(tmp_path / "class", body)
    assert penstock("predict", str(folder), "-i", "sizes=[2, 3]", "-o", f"{tmp_path}/out.txt") == 0
    assert (tmp_path / "out.txt").read_text() == "01"


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "class").mkdir()
    folder = write_class(
        tmp_path / "class", FILES.format(output="str", each="pass", end="return 'a'")
    )
    path = tmp_path / "missing" / "out.txt"
    assert penstock("predict", str(folder), "-i", "sizes=[]", "-o", str(path)) == 1
    assert f"-o {path}: No such file or directory" in capsys.readouterr().err
