"""Pieces from a class that starts over: readers get only the pieces they are missing, if any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.models.tasks.custom import CustomResult
from tests.limits import WAIT_LIMIT_S
from tests.workers.models.custom.classes import prepared, write_class
from tests.workers.models.custom.started import STEP_S, StartClass, StartedClass
from workers.models.base import PreparedCustom

BODY = """
class Predictor(BasePredictor):
    def predict(self, word: str, go: str) -> Iterator[str]:
        for number in range(4):
            yield f"{word} {number}"
        while not os.path.exists(go):
            time.sleep(0.01)
"""


@pytest.fixture
def model(tmp_path: Path, start_class: StartClass) -> StartedClass:
    return start_class(write_class(tmp_path, BODY))


def streamed(
    model: StartedClass, item: PreparedCustom, text: str, go: Path
) -> tuple[list[tuple[int, str]], Any]:
    """An item's chunks, each with the number of pieces before it, and the output.

    The class finishes once its pieces have been reported. Pieces sent along with the result are
    only in its output.
    """
    model.admit(0, item)
    chunks: list[tuple[int, str]] = []
    for _ in range(int(WAIT_LIMIT_S / STEP_S)):
        if "".join(piece for _, piece in chunks) == text:
            go.touch()
        end = model.step()
        chunks += [(one.first, one.text) for one in model.take_chunks().values()]
        if end.results:
            result = end.results[0]
            assert isinstance(result, CustomResult)
            return chunks, result.output
    raise AssertionError(f"{chunks}, not {text}")


@pytest.mark.parametrize(
    ("written", "first", "text"),
    [
        ((), 0, '["a 0",[]]\n["a 1",[]]\n["a 2",[]]\n["a 3",[]]\n'),
        (('["a 0",[]]\n', '["a 1",[]]\n'), 2, '["a 2",[]]\n["a 3",[]]\n'),
        (('["b 0",[]]\n',), None, ""),
        (('["a 0",[]]\n', '["b 1",[]]\n', '["a 2",[]]\n'), None, ""),
        (('["a 0",[]]\n', '["a 1",[]]\n', '["a 2",[]]\n', '["a 3",[]]\n'), None, ""),
    ],
    ids=["new", "goes on", "another first", "another one between", "all are there"],
)
def test_pieces_that_were_streamed_before_are_not_streamed_again(
    model: StartedClass, tmp_path: Path, written: tuple[str, ...], first: int | None, text: str
) -> None:
    go = tmp_path / "go"
    item = prepared({"word": "a", "go": str(go)})
    item.is_streamed = True
    item.written_pieces, item.written_text = len(written), "".join(written)
    chunks, output = streamed(model, item, text, go)
    assert output == ["a 0", "a 1", "a 2", "a 3"]
    assert "".join(piece for _, piece in chunks) == text
    assert (chunks[0][0] if chunks else None) == first
