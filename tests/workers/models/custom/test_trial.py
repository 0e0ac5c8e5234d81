"""`penstock predict`: inputs as a person types them."""

from pathlib import Path

import pytest

from tests.workers.models.custom.classes import write_class
from workers.models.custom.trial import predict

CLASS = """
class Runner(BaseRunner):
    def run(self, words: list[str] = ["none"], numbers: list[int] = [], of: dict = {}) -> dict:
        return {"words": words, "numbers": numbers, "of": of}
"""


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["words=one"], '"words": [\n    "one"\n  ]'),
        (["words=one", "words=two"], '"words": [\n    "one",\n    "two"\n  ]'),
        (['words=["one", "two"]'], '"words": [\n    "one",\n    "two"\n  ]'),
        (["numbers=3", "numbers=4"], '"numbers": [\n    3,\n    4\n  ]'),
        (['of={"a": 1}'], '"of": {\n    "a": 1\n  }'),
    ],
)
def test_lists_are_typed_as_json_or_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], shown: str
) -> None:
    predict(write_class(tmp_path, CLASS), typed, tmp_path)
    assert shown in capsys.readouterr().out
